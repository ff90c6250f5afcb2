// Java's own HTTP client with its default settings: it offers HTTP/2 by `Upgrade: h2c`. The JRE alone runs this file.
// It writes the same lines that tally.py writes.

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

public class JavaHttp {
  interface Tried {
    void run() throws Exception;
  }

  static final int AT_ONCE = 8;
  static final Pattern CONTENT = Pattern.compile("\"content\":\"([^\"]*)\""); // how many events hold it depends on the load
  static Path results;
  static String url;
  static String model;
  static HttpClient client = HttpClient.newHttpClient();

  public static void main(String[] words) throws Exception {
    results = Path.of(words[3], "results.jsonl");
    url = words[4];
    model = words[5];
    check("models", () -> expect(get("/v1/models"), 200, "\"id\":\"" + model + "\""));
    check("chat", () -> expect(post("/v1/chat/completions", text(chat("hello there", ""))), 200, "hello there"));
    check("a new client's first request is a POST", () -> {
      for (int i = 0; i < AT_ONCE; i++) {
        client = HttpClient.newHttpClient();
        expect(post("/v1/chat/completions", text(chat("hello " + i, ""))), 200, "hello " + i);
      }
    });
    check("a body of unknown length", () -> {
      byte[] body = chat("hello there", "").getBytes(StandardCharsets.UTF_8);
      BodyPublisher unknown = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body));
      expect(post("/v1/chat/completions", unknown), 200, "hello there");
    });
    check("a long body", () -> expect(post("/v1/chat/completions", text(longChat())), 200, "heard it all"));
    check("stream", JavaHttp::stream);
    check("messages", () -> expect(post("/v1/messages", text(chat("hello there", ""))), 200, "hello there"));
    check("responses", () -> {
      String body = "{\"model\": \"" + model + "\", \"input\": \"say:hello there\"}";
      expect(post("/v1/responses", text(body)), 200, "hello there");
    });
    check("requests at once", JavaHttp::atOnce);
    check("errors", () -> {
      expect(post("/v1/chat/completions", text("{")), 400, "not valid JSON");
      expect(post("/v1/nothing", text("{}")), 404, "error");
      expect(post("/v1/chat/completions", text(chat("x", "").replace(model, "no-such"))), 404, "no-such");
    });
    check("HTTP/1.1 asked for", () -> {
      client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
      expect(post("/v1/chat/completions", text(chat("hello there", ""))), 200, "hello there");
    });
    System.exit(0);
  }

  static void check(String name, Tried tried) throws Exception {
    String failure = "";
    try {
      tried.run();
    } catch (Exception | AssertionError error) {
      failure = String.valueOf(error);
    }
    String line = "{\"check\": " + quoted(name) + ", \"failure\": " + quoted(failure) + "}\n";
    Files.writeString(results, line, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
  }

  static String quoted(String text) {
    String plain = text.length() > 600 ? text.substring(0, 600) : text;
    return "\"" + plain.replace("\\", "\\\\").replace("\"", "\\\"").replaceAll("\\p{Cntrl}", " ") + "\"";
  }

  static BodyPublisher text(String body) {
    return BodyPublishers.ofString(body);
  }

  static String chat(String said, String more) {
    String messages = "[{\"role\": \"user\", \"content\": \"say:" + said + "\"}]";
    return "{\"model\": \"" + model + "\", \"max_tokens\": 50, \"messages\": " + messages + more + "}";
  }

  static String longChat() {
    String before = "{\"role\": \"system\", \"content\": \"" + "abcd".repeat(25_000) + "\"}, ";
    return chat("heard it all", "").replace("\"messages\": [", "\"messages\": [" + before);
  }

  static HttpRequest.Builder request(String path) {
    return HttpRequest.newBuilder(URI.create(url + path)).header("Content-Type", "application/json");
  }

  static HttpResponse<String> get(String path) throws Exception {
    return client.send(request(path).GET().build(), BodyHandlers.ofString());
  }

  static HttpResponse<String> post(String path, BodyPublisher body) throws Exception {
    return client.send(request(path).POST(body).build(), BodyHandlers.ofString());
  }

  static void expect(HttpResponse<String> answer, int status, String text) {
    if (answer.statusCode() != status || !answer.body().contains(text)) {
      throw new AssertionError(answer.statusCode() + ": " + answer.body());
    }
  }

  static void stream() throws Exception {
    HttpRequest asked = request("/v1/chat/completions").POST(text(chat("hello there", ", \"stream\": true"))).build();
    HttpResponse<java.util.stream.Stream<String>> answer = client.send(asked, BodyHandlers.ofLines());
    List<String> lines = answer.body().filter(line -> line.startsWith("data: ")).collect(Collectors.toList());
    String said = CONTENT.matcher(String.join("", lines)).results().map(found -> found.group(1)).collect(Collectors.joining());
    if (answer.statusCode() != 200 || !said.equals("hello there") || !lines.get(lines.size() - 1).equals("data: [DONE]")) {
      throw new AssertionError(answer.statusCode() + ": " + lines);
    }
  }

  static void atOnce() {
    List<CompletableFuture<HttpResponse<String>>> all = IntStream.range(0, AT_ONCE)
        .mapToObj(i -> request("/v1/chat/completions").POST(text(chat("hello " + i, ""))).build())
        .map(asked -> client.sendAsync(asked, BodyHandlers.ofString()))
        .collect(Collectors.toList());
    for (int i = 0; i < AT_ONCE; i++) {
      expect(all.get(i).join(), 200, "hello " + i);
    }
  }
}
