package prompt

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

const modelsDir = "../test/models"

var modelNames = []string{"tiny-bytelevel", "tiny-sentencepiece"}

// goldens are results of Hugging Face tokenizers and Transformers for texts and chats. See test/models/train.py.
type goldens struct {
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
	if len(g.Chats) < 30 {
		t.Fatalf("only %d chats", len(g.Chats))
	}
	return g
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
				request, err := body.ParseRequest("/v1/chat/completions", want.Request)
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

// renderTransformers renders a chat like transformers 5.23.0: it drops message fields that are None, and gives
// reasoning several names. It joins text parts, like the callers of Transformers do for templates that take strings.
func renderTransformers(m *Model, request *body.Request) (string, error) {
	c := &chat{tools: request.Tools, documents: request.Documents, continueFinalMessage: request.ContinueFinalMessage}
	for _, item := range request.Messages.Items {
		var reasoning any
		message, content := values.NewDict(), []string(nil)
		for key, value := range item.(*values.Dict).All() {
			name := key.(string)
			if value == nil {
				continue
			}
			if parts, ok := value.(*values.List); ok && name == "content" {
				for _, part := range parts.Items {
					text, _ := get[string](part.(*values.Dict), "text")
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

func ExampleModel_Encode() {
	m, err := Load("../test/models/tiny-bytelevel", Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	ids, err := m.Encode("<|im_start|>user\nWhat is a cache?<|im_end|>", false)
	fmt.Println(len(ids), ids[0], err)
	// Output: 12 3073 <nil>
}
