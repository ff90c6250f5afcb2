// Java's own HTTP client with its defaults: on plain HTTP it asks each server for an upgrade to HTTP/2.
// Arguments: the server's URL and a model. Prints one line per exchange; fails if one is not as it must be.

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;

public class JavaClient {
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static String url;

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        String plain = "{\"model\": \"" + arguments[1] + "\", \"prompt\": \"a\", \"max_tokens\": 4%s}";
        String body = String.format(plain, "");
        String large = String.format(plain, ", \"user\": \"" + "x".repeat(200_000) + "\"");
        for (int i = 0; i < 5; i++) {
            check("whole", post(BodyPublishers.ofString(body)), "text_completion");
            check("chunked", post(chunked(body)), "text_completion");
            check("large", post(BodyPublishers.ofString(large)), "text_completion");
            check("large and chunked", post(chunked(large)), "text_completion");
            check("stream", post(BodyPublishers.ofString(String.format(plain, ", \"stream\": true"))), "[DONE]");
        }
        check("get", HttpRequest.newBuilder(URI.create(url + "/v1/models")), "\"list\"");
    }

    static HttpRequest.Builder post(BodyPublisher body) {
        URI uri = URI.create(url + "/v1/completions");
        return HttpRequest.newBuilder(uri).header("Content-Type", "application/json").POST(body);
    }

    static BodyPublisher chunked(String body) {
        return BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body.getBytes(StandardCharsets.UTF_8)));
    }

    static void check(String what, HttpRequest.Builder request, String expected) throws Exception {
        HttpResponse<String> answer = CLIENT.send(request.build(), BodyHandlers.ofString());
        System.out.println(what + ": " + answer.statusCode() + " " + answer.version());
        if (answer.statusCode() != 200 || !answer.body().contains(expected)) {
            throw new AssertionError(what + ": " + answer.body());
        }
    }
}
