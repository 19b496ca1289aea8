package parity

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/prompt/remote"
)

// TestRemote sends requests through prompt/remote to a server that answers with the engines' own request and
// response classes. It compares the ids with those of the engines' own code for the same requests.
func TestRemote(t *testing.T) {
	if testing.Short() {
		t.Log("make test-long runs the engines' own code")
		return
	}
	const data, folder = "../../prompt/testdata/", "../../test/models/tiny-bytelevel"
	payload, err := os.ReadFile(data + "requests.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	payload = append(payload, mixed(t, payload, 300)...)
	completions := []string{
		`{"model":"m","prompt":"a <b> \"c\" é 😀"}`,
		`{"model":"m","prompt":["one","two three"],"stream":true,"max_tokens":1}`,
		`{"model":"m","prompt":"x","add_special_tokens":false}`,
		`{"model":"m","prompt":["x","y"],"add_special_tokens":true,"echo":true}`,
	}
	templates, err := filepath.Glob(data + "templates/*.jinja")
	if err != nil || len(templates) == 0 {
		t.Fatalf("%v: %v", templates, err)
	}
	for _, c := range []struct {
		name   string
		engine prompt.Engine
		render bool
	}{{"vllm render", prompt.VLLM, true}, {"vllm tokenize", prompt.VLLM, false},
		{"sglang", prompt.SGLang, false}} {
		t.Run(c.name, func(t *testing.T) {
			interpreter, sources := oracle(t, c.engine, "")
			python := startAsker(t, interpreter, "engines.py", string(c.engine), sources)
			if _, err := python.ask(map[string]string{"folder": folder}); err != nil {
				t.Fatal(err)
			}
			var template string
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				endpoint := "tokenize"
				switch path := r.URL.Path; {
				case path == "/model_info":
					io.WriteString(w, `{"has_image_understanding":false,"has_audio_understanding":false}`)
					return
				case strings.HasSuffix(path, "/render") && c.render:
					endpoint = "render"
				case path != "/tokenize" || c.render:
					w.WriteHeader(http.StatusForbidden)
					return
				}
				sent, err := io.ReadAll(r.Body)
				if err != nil {
					t.Error(err)
				}
				response, err := python.ask(
					map[string]any{"endpoint": endpoint, "template": template, "body": json.RawMessage(sent)},
				)
				if err != nil {
					t.Error(err)
				}
				if bytes.HasPrefix(response, []byte(`{"error"`)) {
					w.WriteHeader(http.StatusBadRequest)
				}
				w.Write(response)
			}))
			defer server.Close()
			client, err := remote.New(
				remote.Config{Model: "m", URL: server.URL, Engine: c.engine, Timeout: time.Minute},
				metrics.New(),
				slog.New(slog.DiscardHandler),
			)
			if err != nil {
				t.Fatal(err)
			}
			equal, refused, declined, wrong := 0, 0, 0, 0
			for _, path := range templates {
				source, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				template = string(source)
				for line := range bytes.Lines(payload) {
					line = bytes.TrimSpace(line)
					response, err := python.ask(map[string]any{"template": template, "body": json.RawMessage(line)})
					if err != nil {
						t.Fatal(err)
					}
					var want rendered
					if err := json.Unmarshal(response, &want); err != nil {
						t.Fatal(err)
					}
					request, err := body.ParseRequest("/v1/chat/completions", line)
					if err != nil {
						t.Fatalf("%s: %v", line, err)
					}
					ids, err := client.Tokenize(t.Context(), request, line)
					switch outcome := remote.OutcomeOf(err); {
					case want.Error != "" && err == nil && !c.render: // /tokenize takes more
						refused++
					case want.Error != "" && outcome == remote.Unsupported: // media
						refused++
					case outcome == remote.Refused &&
						(want.Error != "" ||
							c.engine == prompt.SGLang): // only these check requests before rendering
						refused++
					case outcome == remote.Unsupported:
						declined++
					case err != nil || want.Error != "" || len(ids) != 1 || !slices.Equal(ids[0], want.IDs):
						wrong++
						t.Errorf(
							"%s: %s\n got %v, %v\nwant %v %s",
							filepath.Base(path),
							line,
							ids,
							err,
							want.IDs,
							want.Error,
						)
					default:
						equal++
					}
				}
			}
			t.Logf(
				"%d chats: %d equal, %d refused by the engine, %d declined, %d differ",
				equal+refused+declined+wrong,
				equal,
				refused,
				declined,
				wrong,
			)
			if equal == 0 || c.render && declined > 0 {
				t.Error("too few ids were compared")
			}
			count(equal+wrong, 0, wrong)

			m, err := prompt.Load(folder, prompt.Options{Engine: c.engine})
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range completions {
				request, err := body.ParseRequest("/v1/completions", []byte(line))
				if err != nil {
					t.Fatal(err)
				}
				want, err := m.Tokenize(t.Context(), request)
				if err != nil {
					t.Fatal(err)
				}
				ids, err := client.Tokenize(t.Context(), request, []byte(line))
				if err != nil ||
					!slices.EqualFunc(
						prompt.Certain(ids),
						want,
						func(a, b prompt.Prompt) bool { return slices.Equal(a.IDs, b.IDs) },
					) {
					t.Errorf("%s: %v, %v; want %v", line, ids, err, want)
				}
			}
		})
	}
}
