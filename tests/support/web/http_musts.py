"""What RFC 9110 and 9112 demand (MUST) of an origin server whose bodies are JSON or event streams.

Left out: demands on clients, user agents, proxies, gateways, tunnels, caches, on TLS, and on registries. `test` names a
test function; without one, `why_not` says why none is needed. Each text is a summary, not the RFC's own words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Must:
    section: str
    what: str
    test: str = ""
    why_not: str = ""


PARSER = "test_a_head_that_breaks_a_rule_is_refused"
EARLY = "test_an_early_answer_is_read_by_who_sends_first"
UPGRADED = "test_an_upgrade_is_ignored_and_its_body_read"
OLD = "test_an_old_client_gets_no_chunks"
NO_RANGES = "no path has ranges, so Range, If-Range and Content-Range are ignored"
NO_VALIDATORS = "no answer has a validator or a date of modification, so no condition can be evaluated"
NEVER_SENT = "this server never sends it"

RFC_9110 = (
    Must("2.4", "read elements at least as long as those that one sends", "test_a_head_has_so_many_bytes"),
    Must("3.7", "don't assume that two requests on one connection have one author", why_not="each request has its key"),
    Must("4.2", "refuse http and https URIs with an empty host", PARSER),
    Must(
        "5.3",
        "don't act on a request before its whole head is there",
        "test_a_head_without_an_end_is_answered_and_hung_up",
    ),
    Must("5.3", "don't send several lines of one name unless it is a list", "test_an_answer_has_each_header_once"),
    Must("5.4", "refuse headers that are too large with a 4xx", "test_a_head_has_so_many_bytes"),
    Must("5.5", "remove white space around values", "test_codings_are_a_list"),
    Must("5.5", "refuse CR, LF and NUL in values", PARSER),
    Must("5.6.1", "skip empty elements of lists", "test_codings_are_a_list"),
    Must("5.6.7", "write dates in one form, and read three", "test_an_answer_has_each_header_once"),
    Must("6.2", "send only versions that one conforms to", "test_other_versions_get_an_answer_in_ours"),
    Must("6.5.1", "don't merge trailers into headers", "test_trailers_are_no_headers"),
    Must("6.6.1", "send Date in 2xx, 3xx and 4xx", PARSER),
    Must(
        "7.4", "refuse what the scheme's rules refuse", why_not="the router has no TLS, and http has no further rules"
    ),
    Must("7.6.1", "list connection headers in Connection", "test_a_kept_connection_says_how_long"),
    Must("7.8", "send Upgrade with 101 and 426; switch only to what was asked", why_not=NEVER_SENT),
    Must("7.8", "ignore Upgrade in HTTP/1.0", "test_an_upgrade_without_a_body_is_ignored"),
    Must("8.4", "name the codings of a body in Content-Encoding", why_not="answers are not compressed"),
    Must("8.6", "the length in an answer to HEAD is that of GET", "test_a_head_request_has_the_length_of_get"),
    Must("8.6", "no Content-Length in 1xx, 204, and 2xx to CONNECT", why_not=NEVER_SENT),
    Must("8.6", "survive huge lengths", PARSER),
    Must("8.7", "Content-Location in a request changes nothing", why_not="it is never read"),
    Must("8.8", "rules for Last-Modified and ETag", why_not=NO_VALIDATORS),
    Must("9.1", "support GET and HEAD", "test_a_head_request_has_the_length_of_get"),
    Must("9.3.2", "no body in an answer to HEAD", "test_a_head_request_has_the_length_of_get"),
    Must("9.3.4", "rules for PUT", why_not="no path takes PUT"),
    Must("9.3.6", "refuse CONNECT with a bad port", PARSER),
    Must("10.1.1", "ignore 100-continue in HTTP/1.0", "test_only_new_clients_are_told_to_continue"),
    Must("10.1.1", "send 100 or a final status at once", "test_only_new_clients_are_told_to_continue"),
    Must("10.1.1", "after 100 a final status follows", "test_only_new_clients_are_told_to_continue"),
    Must("10.2.1", "Allow in 405", "test_a_path_names_its_methods"),
    Must("11.6.1", "WWW-Authenticate in 401", "test_an_answer_without_a_key_names_the_scheme"),
    Must("12.5.3", "no Accept-Encoding in a 415 about a media type", "test_a_415_about_a_media_type_lists_no_codings"),
    Must("13", "rules for conditions", why_not=NO_VALIDATORS),
    Must("14", "rules for ranges, 206 and 416", why_not=NO_RANGES),
    Must("15.2", "no 1xx to HTTP/1.0", "test_only_new_clients_are_told_to_continue"),
    Must("15.3.6", "no body in 205", why_not=NEVER_SENT),
    Must("15.4.5", "headers of 304", why_not=NEVER_SENT),
    Must("17.5", "survive huge numbers", PARSER),
)

RFC_9112 = (
    Must("2.2", "parse as octets in a superset of US-ASCII", PARSER),
    Must("2.2", "refuse or replace a bare CR", PARSER),
    Must("2.2", "refuse or skip white space before the first header", PARSER),
    Must("3", "414 for a target that is too long", PARSER),
    Must("3.2", "400 without Host, with several, or with an invalid one", PARSER),
    Must("3.2.2", "take absolute targets, and their host instead of Host", "test_an_absolute_target_has_the_host"),
    Must("4", "a space after the status code", "test_other_versions_get_an_answer_in_ours"),
    Must("5.1", "refuse white space before a colon", PARSER),
    Must("5.2", "refuse or replace folded lines; send none", PARSER),
    Must("6.1", "read chunked; never send it twice", UPGRADED),
    Must("6.1", "no Transfer-Encoding in 1xx and 204, or to HTTP/1.0", OLD),
    Must("6.1", "close after a request with both framings", PARSER),
    Must("6.1", "Transfer-Encoding in HTTP/1.0 is faulty framing", PARSER),
    Must("6.2", "never send both framings", OLD),
    Must("6.3", "400 and close if chunked is not the last coding", PARSER),
    Must("6.3", "400 and close for an invalid length", PARSER),
    Must("6.3", "a body that ends early is incomplete: close", "test_a_body_that_ends_early_is_not_served"),
    Must("7.1", "survive huge chunk sizes", PARSER),
    Must("7.1.1", "skip unknown chunk extensions", UPGRADED),
    Must("7.1.2", "keep trailers apart from headers", "test_trailers_are_no_headers"),
    Must("9.3", "say close in every answer if not persistent", OLD),
    Must("9.3", "read the whole body or close after the answer", "test_a_connection_serves_on_after_an_early_answer"),
    Must("9.3.2", "answer pipelined requests in their order", "test_answers_come_in_the_order_of_requests"),
    Must(
        "9.6",
        "close after the answer to a request with close; serve no further ones",
        "test_nothing_is_served_after_close",
    ),
    Must("9.6", "close after an answer with close", "test_an_early_answer_to_who_waits_ends_the_connection"),
    Must("9.6", "close in stages, so that the answer is not lost", EARLY),  # a recommendation there, our promise
)
