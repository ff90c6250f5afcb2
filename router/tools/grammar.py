"""Turn a format's row into the grammar of an answer with tools, in llguidance's dialect of Lark.

auto:      text; or text up to a call's beginning, then only calls
required:  only calls
named:     only one call

A thought may precede each answer. If the prompt has opened the thought, the answer must close it first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from router.tools.calls.call_shape import (
    HEAD_SPACES,
    SPACES,
    CallRules,
    Markers,
    escaped,
    regex,
    text_without,
)
from router.tools.calls.channels import ChannelCalls
from router.tools.calls.format_row import ToolFormat
from router.tools.reasoning import Thought
from router.tools.schemas.choice import ChoiceMode, ToolChoice

GAP = "/[ \\t\\r\\n]{1,4}/"


def tool_grammar(
    row: ToolFormat,
    choice: ToolChoice,
    *,
    allows_parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    thought: Thought | None = None,
    has_body: bool = False,
) -> str | None:
    """Return an answer's grammar; None if any text is allowed. Raise InvalidRequest for a tool that can't be called.

    - `special_ids`: special tokens in marks, which llguidance matches only by id
    - `has_body`: an answer without calls must follow the grammar that `with_body` adds
    """
    if choice.mode is ChoiceMode.NONE or not choice.tools:
        return None
    markers = Markers(special_ids or {})
    many = allows_parallel and choice.mode is not ChoiceMode.NAMED
    if isinstance(row.shape, ChannelCalls):
        return written(_channel_rules(row.shape, markers, choice, thought, has_body))
    return _Grammar(row, markers, many, has_body).text(choice, thought)


def behind_thought(grammar: str, thought: Thought, special_ids: Mapping[str, int]) -> str:
    """Put a thought before `grammar`. The thought is required if the prompt has opened it.

    Both `grammar` and the result are llguidance's JSON."""
    markers = Markers(special_ids)
    begin = "inside" if thought.is_open else "(opening inside)?"
    rules = {"start": f"{begin} GAP? {_content_begin(thought, markers)}@body", "GAP": GAP}
    return with_body(written(rules | thought_rules(thought, markers)), grammar)


def written(rules: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items()) + "\n"


def with_body(lark: str, body: str) -> str:
    """Serialize two grammars. `lark` refers to `body` as `@body`."""
    (inner,) = json.loads(body)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**inner, "name": "body"}]})


def thought_rules(thought: Thought, markers: Markers, without: Sequence[str] = ()) -> dict[str, str]:
    """Return rules for `opening`, if the answer must write it, and for `inside`: the thought up to what follows it.

    `without`: marks that a thought can't hold if they are special tokens."""
    tags = thought.tags
    rules = {"inside": f"thought_text {markers.rule(tags.then)}" if tags.then else "thought_text"}
    markers.up_to("thought_text", tags.closing, rules, without)
    if thought.is_open:
        return rules
    if markers.is_special(tags.opening):
        return rules | {"opening": f"GAP? {markers.rule(tags.opening)}"}
    return rules | {"opening[lazy]": regex(HEAD_SPACES, escaped(tags.opening))}


def _content_begin(thought: Thought, markers: Markers) -> str:
    """What stands before content, if the vocabulary has the mark; otherwise nothing."""
    mark = thought.tags.content
    return f"{markers.rule(mark)} " if mark and (markers.is_special(mark) or thought.tags.channels) else ""


def _channel_rules(
    shape: ChannelCalls, markers: Markers, choice: ToolChoice, thought: Thought | None, has_body: bool
) -> dict[str, str]:
    """An answer is messages. Thoughts come first, then texts and at most one call, which ends the answer."""
    channels = shape.channels
    calls = [shape.rules(tool, f"t{index}", markers) for index, tool in enumerate(choice.tools)]
    next_message = markers.rule(channels.role)
    is_open = thought is not None and thought.is_open
    message = f"{markers.rule(channels.thought)} text {next_message}"
    content = markers.rule(channels.content)
    must_call = choice.mode is not ChoiceMode.AUTO
    answers = ["call"] if must_call else ["call", f"{content} @body" if has_body else f"{content} LAST"]
    before = "" if must_call or has_body else f" ({content} text {next_message})*"
    rules = {
        "start": (f"text {next_message} " if is_open else "") + f"({message})*{before} ({' | '.join(answers)})",
        "call": " | ".join(rules.rest for rules in calls),
        "GAP": GAP,
    }
    markers.up_to("text", channels.next_end, rules, (*channels.starts, *channels.ends))
    if not must_call and not has_body:
        rules["LAST"] = text_without(*channels.ends, *channels.starts)
    for call in calls:
        rules |= call.rules
    return rules


class _Grammar:
    def __init__(self, row: ToolFormat, markers: Markers, allows_many: bool, has_body: bool) -> None:
        self._row = row
        self._markers = markers
        self._many = allows_many
        self._has_body = has_body
        self._rules: dict[str, str] = {}

    def text(self, choice: ToolChoice, thought: Thought | None) -> str:
        calls = [self._call(index, choice) for index in range(len(choice.tools))]
        self._add_groups(calls)
        if choice.mode is ChoiceMode.AUTO:
            self._add_auto(calls, thought)
        else:
            self._add_required(thought)
        start = self._rules.pop("start")
        return written({"start": start, **self._rules})

    def _call(self, index: int, choice: ToolChoice) -> CallRules:
        rules = self._row.shape.rules(choice.tools[index], f"t{index}", self._markers)
        self._rules |= rules.rules
        return rules

    def _add_groups(self, calls: Sequence[CallRules]) -> None:
        """The rule `calls` is a group without its first marker."""
        row = self._row
        self._rules["call"] = " | ".join(f"call_{index}" for index in range(len(calls)))
        for index, call in enumerate(calls):
            self._rules[f"rest_{index}"] = call.rest
            head = f"{call.lead} {regex(call.head)}" if call.lead else regex(SPACES, call.head)
            self._rules[f"call_{index}"] = f"{head} rest_{index}"
        opens = regex(SPACES, escaped(row.opens)) + " " if row.opens else ""
        self._rules["calls"] = f"{opens}call after_call"
        begins = (self._markers.rule(mark, spaced=True) for mark in self._markers.written(row.begins))
        self._rules["group"] = f"({' | '.join(begins)}) calls"
        between = f"{regex(SPACES, escaped(row.separator))} " if row.separator else ""
        more = f"({between}call)* " if row.separator is not None and self._many else ""
        closes = regex(SPACES, escaped(row.closes)) if row.closes else ""
        next_groups = " group*" if self._many and row.separator is None else ""
        end = self._end_of_group()
        if not (more or closes or end or next_groups):
            end = '""'
        self._rules["after_call"] = f"{more}{closes}{end}{next_groups}".strip()
        self._rules["GAP"] = GAP

    def _calls_alone(self) -> str:
        return "calls | group" if self._row.may_begin_bare else "group"

    def _add_required(self, thought: Thought | None) -> None:
        self._rules["answer"] = self._calls_alone()
        self._add_start(thought)

    def _add_auto(self, calls: Sequence[CallRules], thought: Thought | None) -> None:
        """Free text ends where a call begins, because llguidance prefers a complete lazy rule to text."""
        if self._has_body:
            content = _content_begin(thought, self._markers) if thought is not None else ""
            self._rules["answer"] = f"{self._calls_alone()} | GAP? {content}@body"
        else:
            self._add_text(calls, thought)
        self._add_start(thought)

    def _add_start(self, thought: Thought | None) -> None:
        """A call ends a thought that the model does not close: readers take it for a call, so the schema must hold."""
        if thought is None:
            self._rules["start"] = "answer"
            return
        self._rules |= thought_rules(thought, self._markers, self._row.begins)
        without = (*self._row.begins, thought.tags.closing)
        behind = " | ".join(("inside answer", *self._calls_behind_text("unclosed", without)))
        self._rules["start"] = behind if thought.is_open else f"opening ({behind}) | answer"

    def _calls_behind_text(self, name: str, without: Sequence[str]) -> Iterator[str]:
        """Yield alternatives: text without these marks, a marker, then calls. Their rules go to `self._rules`."""
        for index, mark in enumerate(self._markers.written(self._row.begins)):
            rule = f"{name}_{index}"
            right = self._markers.text_and(mark, f"{rule.upper()}_TEXT", self._rules, without)
            self._rules[rule if self._markers.is_special(mark) else f"{rule}[lazy]"] = right
            yield f"{rule} calls"

    def _add_text(self, calls: Sequence[CallRules], thought: Thought | None) -> None:
        self._rules["TEXT"] = text_without(*filter(self._markers.is_special, self._row.begins))
        between = self._between_texts(thought)
        texts = f"(TEXT ({' | '.join(between)}))* " if between else ""
        alternatives = ("TEXT", *self._calls_behind_text("begins", self._row.begins), *self._bare_alternatives(calls))
        self._rules["answer"] = " | ".join(texts + alternative for alternative in alternatives)

    def _between_texts(self, thought: Thought | None) -> list[str]:
        """Return what may stand between texts: special tokens around content, and thoughts, where they recur."""
        tags = thought.tags if thought is not None else None
        marks = {*self._row.frames, *((tags.content, *tags.frames) if tags is not None else ())}
        between = [self._markers.rule(mark) for mark in sorted(marks) if mark and self._markers.is_special(mark)]
        if tags is not None and tags.recurs and self._markers.is_special(tags.opening):
            between.append(f"{self._markers.rule(tags.opening)} thought_text")
        return between

    def _bare_alternatives(self, calls: Sequence[CallRules]) -> Iterator[str]:
        """Yield alternatives of an answer: calls without a marker."""
        if not self._row.may_begin_bare:
            return
        opens = escaped(self._row.opens) + HEAD_SPACES if self._row.opens else ""
        for index, call in enumerate(calls):
            self._rules[f"bare_{index}[lazy]"] = regex(HEAD_SPACES, opens, call.head)
            yield f"bare_{index} rest_{index} after_call"

    def _end_of_group(self) -> str:
        is_needed = not self._row.may_begin_bare
        marks = (self._markers.written if is_needed else self._markers.written_if_any)(self._row.ends)
        if not marks:
            return ""
        spelled = " | ".join(self._markers.rule(mark, spaced=True) for mark in marks)
        return f" ({spelled}){'' if is_needed else '?'}"
