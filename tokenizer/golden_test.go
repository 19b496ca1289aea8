package tokenizer

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvepp/chattemplate"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
)

const modelsDir = "../test/models"

var modelNames = []string{"tiny-bytelevel", "tiny-sentencepiece"}

// goldens are what Hugging Face tokenizers and Transformers make of texts and chats. See test/models/train.py.
type goldens struct {
	Strings []struct {
		Text        string
		IDs         []kvblock.Token
		WithSpecial []kvblock.Token // nil: as IDs
	}
	Chats []struct {
		Request json.RawMessage
		Text    string
		IDs     []kvblock.Token
		Error   string
	}
}

func loadModel(t testing.TB, name string) *Model {
	t.Helper()
	m, err := Load(filepath.Join(modelsDir, name), Options{Engine: Dynamo})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func loadGoldens(t testing.TB, name string) goldens {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, "testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var g goldens
	if err := json.Unmarshal(raw, &g); err != nil {
		t.Fatal(err)
	}
	if len(g.Strings) < 200 || len(g.Chats) < 30 {
		t.Fatalf("only %d strings and %d chats", len(g.Strings), len(g.Chats))
	}
	return g
}

func TestStringsAgainstHuggingFace(t *testing.T) {
	for _, name := range modelNames {
		t.Run(name, func(t *testing.T) {
			m, g := loadModel(t, name), loadGoldens(t, name)
			for _, pass := range []string{"cold caches", "warm caches"} {
				for _, want := range g.Strings {
					ids, err := m.Encode(want.Text, false)
					if err != nil || !slices.Equal(ids, want.IDs) {
						t.Errorf("%s: %q\n got %v, %v\nwant %v", pass, want.Text, ids, err, want.IDs)
					}
					if want.WithSpecial == nil {
						want.WithSpecial = want.IDs
					}
					ids, err = m.Encode(want.Text, true)
					if err != nil || !slices.Equal(ids, want.WithSpecial) {
						t.Errorf(
							"%s, special tokens: %q\n got %v, %v\nwant %v",
							pass,
							want.Text,
							ids,
							err,
							want.WithSpecial,
						)
					}
				}
			}
		})
	}
}

func TestChatsAgainstTransformers(t *testing.T) {
	for _, name := range modelNames {
		t.Run(name, func(t *testing.T) {
			g := loadGoldens(t, name)
			m, err := Load(filepath.Join(modelsDir, name), Options{})
			if err != nil {
				t.Fatal(err)
			}
			rendered := 0
			for _, want := range g.Chats {
				request, err := apibody.ParseRequest("/v1/chat/completions", want.Request)
				if err != nil {
					t.Fatal(err)
				}
				text, err := renderTransformers(m, request)
				if want.Error != "" {
					if err == nil {
						t.Errorf("%s\nrenders %q, where Transformers fails: %s", want.Request, text, want.Error)
					}
					continue
				}
				rendered++
				if err != nil || text != want.Text {
					t.Errorf("%s\n got %q, %v\nwant %q", want.Request, text, err, want.Text)
				}
				ids, err := m.Encode(text, false)
				if err != nil || !slices.Equal(ids, want.IDs) {
					t.Errorf("%s\n got %v, %v\nwant %v", want.Request, ids, err, want.IDs)
				}
			}
			if rendered < 30 {
				t.Errorf("only %d chats render", rendered)
			}
		})
	}
}

// renderTransformers is what transformers 5.23.0 makes of a chat: it drops message fields that are None, and gives
// reasoning several names. Text parts are joined, as whoever calls it does for templates that take strings.
func renderTransformers(m *Model, request *apibody.Request) (string, error) {
	c := &chat{tools: request.Tools, documents: request.Documents, continueFinalMessage: request.ContinueFinalMessage}
	for _, item := range request.Messages.Items {
		var reasoning any
		message, content := chattemplate.NewDict(), []string(nil)
		for key, value := range item.(*chattemplate.Dict).All() {
			name := key.(string)
			if value == nil {
				continue
			}
			if parts, ok := value.(*chattemplate.List); ok && name == "content" {
				for _, part := range parts.Items {
					text, _ := get[string](part.(*chattemplate.Dict), "text")
					content = append(content, text)
				}
				if len(content) > 0 {
					value = strings.Join(content, "\n")
				}
			}
			message.Set(name, value)
		}
		for _, name := range []string{"reasoning", "thinking", "reasoning_content"} {
			if v, ok := message.Get(name); ok {
				reasoning = v
			}
		}
		if reasoning != nil {
			message.Set("thinking", reasoning)
			message.Set("reasoning_content", reasoning)
		}
		c.messages = append(c.messages, message)
	}
	c.addGenerationPrompt = !c.continueFinalMessage
	if request.AddGenerationPrompt != nil {
		c.addGenerationPrompt = *request.AddGenerationPrompt
	}
	c.kwargs = request.ChatTemplateKwargs
	if request.ReasoningEffort != "" {
		c.kwargs = c.kwargs.Clone()
		c.kwargs.Set("reasoning_effort", request.ReasoningEffort)
	}
	return m.apply(context.Background(), m.chat, c)
}

// TestConcurrentEncode lets goroutines fill the same caches.
func TestConcurrentEncode(t *testing.T) {
	for _, name := range modelNames {
		m, g := loadModel(t, name), loadGoldens(t, name)
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				for i := range g.Strings {
					want := g.Strings[(i+worker*50)%len(g.Strings)]
					if ids, err := m.Encode(want.Text, false); err != nil || !slices.Equal(ids, want.IDs) {
						t.Errorf("%s: %q: got %v, %v", name, want.Text, ids, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
}
