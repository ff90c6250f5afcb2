// Go's net/http with its default client. Only the standard library: `go run` needs no network.
// It writes the same lines that tally.py writes.

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

const (
	completions = "/v1/chat/completions"
	atOnce      = 8
)

var results, url, model string
var content = regexp.MustCompile(`"content":"([^"]*)"`)

type object = map[string]any

func main() {
	results, url, model = filepath.Join(os.Args[4], "results.jsonl"), os.Args[5], os.Args[6]
	check("models", func() error { return expect(ask("GET", "/v1/models", nil), 200, model) })
	check("chat", func() error { return expect(post(completions, chat("hello there")), 200, "hello there") })
	check("a body of unknown length", func() error {
		return expect(ask("POST", completions, io.MultiReader(encoded(chat("hello there")))), 200, "hello there")
	})
	check("a long body", func() error {
		body := chat("heard it all")
		long := object{"role": "system", "content": strings.Repeat("abcd", 25_000)}
		body["messages"] = append([]object{long}, body["messages"].([]object)...)
		return expect(post(completions, body), 200, "heard it all")
	})
	check("a body that waits for 100 Continue", continued)
	check("stream", stream)
	check("a stream that the client leaves", left)
	check("messages", func() error { return expect(post("/v1/messages", chat("hello there")), 200, "hello there") })
	check("responses", func() error {
		return expect(post("/v1/responses", object{"model": model, "input": "say:hello there"}), 200, "hello there")
	})
	check("requests at once", allAtOnce)
	check("a connection is used again", reused)
	check("errors", errors)
}

func check(name string, tried func() error) {
	failure := ""
	if err := tried(); err != nil {
		failure = fmt.Sprintf("%.600s", err.Error())
	}
	line, _ := json.Marshal(object{"check": name, "failure": failure})
	file, err := os.OpenFile(results, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	fmt.Fprintf(file, "%s\n", line)
}

func chat(said string) object {
	messages := []object{{"role": "user", "content": "say:" + said}}
	return object{"model": model, "max_tokens": 50, "messages": messages}
}

func encoded(body object) io.Reader {
	data, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return bytes.NewReader(data)
}

type answer struct {
	status int
	body   string
	err    error
}

func post(path string, body object) answer { return ask("POST", path, encoded(body)) }

func ask(method string, path string, body io.Reader) answer {
	request, err := http.NewRequest(method, url+path, body)
	if err != nil {
		return answer{err: err}
	}
	return send(request)
}

func send(request *http.Request) answer {
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, string(data), err}
}

func expect(got answer, status int, text string) error {
	if got.err != nil {
		return got.err
	}
	if got.status != status || !strings.Contains(got.body, text) {
		return fmt.Errorf("%d: %s", got.status, got.body)
	}
	return nil
}

// The default transport sends the body at once when no answer comes within a second.
func continued() error {
	request, err := http.NewRequest("POST", url+completions, encoded(chat("hello there")))
	if err != nil {
		return err
	}
	request.Header.Set("Expect", "100-continue")
	invited := false
	trace := &httptrace.ClientTrace{Got100Continue: func() { invited = true }}
	got := send(request.WithContext(httptrace.WithClientTrace(context.Background(), trace)))
	if !invited {
		return fmt.Errorf("no 100 Continue; then %d: %s", got.status, got.body)
	}
	return expect(got, 200, "hello there")
}

func streamed(ctx context.Context, said string) (*http.Response, error) {
	body := chat(said)
	body["stream"] = true
	body["max_tokens"] = 2000
	request, err := http.NewRequestWithContext(ctx, "POST", url+completions, encoded(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}

func stream() error {
	response, err := streamed(context.Background(), "hello there")
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, last := "", "" // how many events hold the text depends on the load
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "data: ") {
			last = lines.Text()
			for _, found := range content.FindAllStringSubmatch(last, -1) {
				said += found[1]
			}
		}
	}
	if response.StatusCode != 200 || said != "hello there" || last != "data: [DONE]" {
		return fmt.Errorf("%d, said %q, the last is %s", response.StatusCode, said, last)
	}
	return nil
}

func left() error {
	ctx, leave := context.WithTimeout(context.Background(), time.Minute)
	response, err := streamed(ctx, strings.Repeat("word ", 200))
	if err != nil {
		leave()
		return err
	}
	_, err = bufio.NewReader(response.Body).ReadString('\n')
	leave()
	response.Body.Close()
	if err != nil {
		return err
	}
	return expect(post(completions, chat("still here")), 200, "still here")
}

func allAtOnce() error {
	var wait sync.WaitGroup
	failures := make([]error, atOnce)
	for i := 0; i < atOnce; i++ {
		wait.Add(1)
		go func(i int) {
			defer wait.Done()
			said := fmt.Sprintf("hello %d", i)
			failures[i] = expect(post(completions, chat(said)), 200, said)
		}(i)
	}
	wait.Wait()
	for _, failure := range failures {
		if failure != nil {
			return failure
		}
	}
	return nil
}

func reused() error {
	for i := 0; i < 3; i++ {
		again := false
		trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { again = info.Reused }}
		request, err := http.NewRequest("POST", url+completions, encoded(chat("hello there")))
		if err != nil {
			return err
		}
		got := send(request.WithContext(httptrace.WithClientTrace(context.Background(), trace)))
		if err := expect(got, 200, "hello there"); err != nil {
			return err
		}
		if i > 0 && !again {
			return fmt.Errorf("request %d came over a new connection", i)
		}
	}
	return nil
}

func errors() error {
	if err := expect(ask("POST", completions, strings.NewReader("{")), 400, "not valid JSON"); err != nil {
		return err
	}
	if err := expect(post("/v1/nothing", object{}), 404, "error"); err != nil {
		return err
	}
	body := chat("x")
	body["model"] = "no-such"
	return expect(post(completions, body), 404, "no-such")
}
