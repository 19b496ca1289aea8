package prompt

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// chatRequest parses a chat request with these messages and further fields.
func chatRequest(t testing.TB, messages string) *body.Request {
	t.Helper()
	r, err := body.ParseRequest("/v1/chat/completions", []byte(`{"model":"m","messages":`+messages+`}`))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func completionRequest(t testing.TB, fields string) *body.Request {
	t.Helper()
	r, err := body.ParseRequest("/v1/completions", []byte(`{"model":"m",`+fields+`}`))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestTokenizeCompletions(t *testing.T) {
	m := loadModel(t, "tiny-sentencepiece")
	vllm, err := Load(filepath.Join(modelsDir, "tiny-sentencepiece"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	encode := func(text string, special bool) []kvblock.Token {
		ids, err := m.Encode(text, special)
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	if ids := encode("one", true); ids[0] != 1 {
		t.Fatalf("no <s> before %v", ids)
	}
	for _, c := range []struct {
		m      *Model
		fields string
		want   [][]kvblock.Token
	}{
		{vllm, `"prompt":"one"`, [][]kvblock.Token{encode("one", true)}},
		{vllm, `"prompt":["one",""]`, [][]kvblock.Token{encode("one", true), encode("", true)}},
		{vllm, `"prompt":"one","add_special_tokens":false`, [][]kvblock.Token{encode("one", false)}},
		{vllm, `"prompt":[5,6]`, [][]kvblock.Token{{5, 6}}},
		{m, `"prompt":"one\u0000"`, [][]kvblock.Token{encode("one", false)}},
		{m, `"prompt":["one",""]`, [][]kvblock.Token{encode("one", false), {}}},
		{m, `"prompt":[5,6]`, [][]kvblock.Token{{5, 6}}},
		{m, `"prompt":[[5],[]]`, [][]kvblock.Token{{5}, {}}},
		{m, `"prompt":"one","nvext":{"token_data":[9]}`, [][]kvblock.Token{{9}}},
		{m, `"prompt":["a","b"],"nvext":{"token_data":[9]}`, [][]kvblock.Token{encode("a", false), encode("b", false)}},
	} {
		got, err := c.m.Tokenize(t.Context(), completionRequest(t, c.fields))
		if err != nil || fmt.Sprint(idsOf(got)) != fmt.Sprint(c.want) {
			t.Errorf("%s %s: got %v, %v; want %v", c.m.options.Engine, c.fields, got, err, c.want)
		}
	}
}

func TestTokenizeErrors(t *testing.T) {
	bytelevel, sentencepiece := loadModel(t, "tiny-bytelevel"), loadModel(t, "tiny-sentencepiece")
	var raised *jinja.RaiseError
	_, err := sentencepiece.Tokenize(
		t.Context(),
		chatRequest(t, `[{"role":"user","content":"x"},{"role":"tool","content":"y","tool_call_id":"c"}]`),
	)
	if !errors.As(err, &raised) || raised.Message != "only user and assistant may follow the first message" {
		t.Errorf("got %v, want the template's message", err)
	}
	_, err = bytelevel.Tokenize(
		t.Context(),
		chatRequest(t, `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]`),
	)
	if !errors.Is(err, ErrMedia) {
		t.Errorf("got %v, want ErrMedia", err)
	}
	if ids, err := bytelevel.AppendEncode([]kvblock.Token{1}, "a\xffb", true); !errors.Is(err, ErrInvalidUTF8) ||
		len(ids) != 1 {
		t.Errorf("got %v, %v; want ErrInvalidUTF8", ids, err)
	}
	for messages, want := range map[string]string{
		`[{"role":"user","content":"x"}],"chat_template":"{{ 1 }}"`: "refuses chat_template",
		`[{"role":"user","content":"x"}],"add_generation_prompt":true,"continue_final_message":true`: "exclude each " +
			"other",
		`[{"role":"user","content":"x"},{"role":"assistant"}],"continue_final_message":true,` +
			`"add_generation_prompt":false`: "does not show the final message",
		`[{"role":"user"}]`: "refuses content",
	} {
		if ids, err := bytelevel.Tokenize(t.Context(), chatRequest(t, messages)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v; want ...%s...", messages, ids, err, want)
		}
	}
}

func TestTokenDataForChat(t *testing.T) {
	m := loadModel(t, "tiny-bytelevel")
	got, err := m.Tokenize(t.Context(), chatRequest(t, `[{"role":"user","content":"x"}],"nvext":{"token_data":[4,5]}`))
	if err != nil || fmt.Sprint(idsOf(got)) != "[[4 5]]" {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err = m.Tokenize(t.Context(),
		chatRequest(t, `[{"role":"user","content":[{"type":"image_url"}]}],"nvext":{"token_data":[4,5]}`)); !errors.Is(
		err,
		ErrMedia,
	) {
		t.Errorf("with an image: got %v, %v", got, err)
	}
}

func TestChatContentForms(t *testing.T) {
	strings := loadModel(t, "tiny-bytelevel")
	parts, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{
		"chat_template.jinja": "{% for m in messages %}{% if m.content is not string %}{% for p in m.content %}[{{ " +
			"p.text }}]{% endfor %}{% endif %}{% endfor %}",
	}), Options{Engine: Dynamo})
	if err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string][2]string{
		`"a"`: {"a", "[a]"},
		`[{"type":"text","text":"a"},{"type":"text","text":"b"}]`: {"a\nb", "[a][b]"},
		`[{"type":"text","text":"a"}]`:                            {"a", "[a]"},
	} {
		request := chatRequest(t, `[{"role":"user","content":`+content+`}],"add_generation_prompt":false`)
		got, err := strings.renderChat(t.Context(), request)
		if full := "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n" +
			want[0] + "<|im_end|>\n"; err != nil ||
			got != full {
			t.Errorf("%s: got %q, %v; want %q", content, got, err, full)
		}
		if got, err := parts.renderChat(t.Context(), request); err != nil || got != want[1] {
			t.Errorf("%s: got %q, %v; want %q", content, got, err, want[1])
		}
	}
}

// TestTokenizeLeavesRequest: tokenizing a request twice does not change it.
func TestTokenizeLeavesRequest(t *testing.T) {
	m := loadModel(t, "tiny-bytelevel")
	request := chatRequest(
		t,
		`[{"role":"user","content":[{"type":"text","text":"x"}],"name":null},{"role":"assistant","content":"y",`+
			`"reasoning":"r"}],
		"continue_final_message":true,"add_generation_prompt":false,"chat_template_kwargs":{"messages":[],"k":1}`,
	)
	first, err := m.Tokenize(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	second, err := m.Tokenize(t.Context(), request)
	if err != nil || fmt.Sprint(first) != fmt.Sprint(second) {
		t.Errorf("first %v, then %v, %v", first, second, err)
	}
	message := request.Messages.Items[1].(*values.Dict)
	if content, _ := message.Get("content"); content != "y" || message.Len() != 3 {
		t.Errorf("the request changed: content %v, %d fields", content, message.Len())
	}
}

// prose returns text of about n bytes with little repetition.
func prose(n int) string {
	words := strings.Fields(
		"the a cache keeps what was computed before so that request which begins like an earlier one starts further " +
			"along in " +
			"morning harbour quiet boats left dawn nobody expected them back until evening please summarise " +
			"following report three sentences",
	)
	var b strings.Builder
	for i := uint32(1); b.Len() < n; i = i*1664525 + 1013904223 {
		b.WriteString(words[i>>16%uint32(len(words))])
		b.WriteByte(" \n,"[i>>29%3])
		if i>>20%7 == 0 {
			fmt.Fprintf(&b, "word%d ", i>>24)
		}
	}
	return b.String()
}

func BenchmarkEncode(b *testing.B) {
	for _, name := range modelNames {
		m, uncached := loadModel(b, name), loadModel(b, name)
		uncached.encoder.DisableCache()
		text := prose(24 << 10)
		out := make([]kvblock.Token, 0, 1<<15)
		b.Run(filepath.Base(name)+"/words", func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				var err error
				if out, err = uncached.AppendEncode(out[:0], text, true); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(out)), "ns/token")
		})
		b.Run(filepath.Base(name)+"/segments", func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				var err error
				if out, err = m.AppendEncode(out[:0], text, true); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkEncodeCold encodes new text, including a few new words, after other data has filled the processor's caches.
// This is the cost of an encode in a program that also does other work. KVEPP_MODELS names folders of real models,
// whose tables exceed these caches; without it, the benchmark uses the tests' small models.
func BenchmarkEncodeCold(b *testing.B) {
	folders := strings.Fields(os.Getenv("KVEPP_MODELS"))
	if len(folders) == 0 {
		for _, name := range modelNames {
			folders = append(folders, filepath.Join(modelsDir, name))
		}
	}
	syllables := strings.Fields("ba ber cla da fen gro hel ish jor kel lan mor nor qui shi tor val wen xi yor zan")
	rng := rand.New(rand.NewPCG(11, 12))
	other := make([]byte, 64<<20)
	for _, folder := range folders {
		m, err := Load(folder, Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(filepath.Base(folder), func(b *testing.B) {
			b.ReportAllocs()
			tokens := 0
			for b.Loop() {
				b.StopTimer()
				words := strings.Fields(prose(26 << 10))
				for i := range words {
					if rng.IntN(33) == 0 {
						words[i] = syllables[rng.IntN(len(syllables))] + syllables[rng.IntN(
							len(syllables))] + syllables[rng.IntN(len(syllables))]
					}
				}
				text := strings.Join(words, " ")
				for i := 0; i < len(other); i += 64 {
					other[i]++
				}
				b.StartTimer()
				ids, err := m.Encode(text, true)
				if err != nil {
					b.Fatal(err)
				}
				tokens += len(ids)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tokens), "ns/token")
		})
	}
}

// BenchmarkTokenizeChat measures the time from a body of about 32 kB, a chat of 20 messages, to ids: the same body each
// time ("repeated"), the same chat with a new response and question each time ("grown"), and a new number in each
// message ("unseen", though words repeat). The models of "repeated/..." have the same tokenizer, and encode chats
// without a template.
func BenchmarkTokenizeChat(b *testing.B) {
	m := loadModel(b, "tiny-bytelevel")
	text := prose(1600)
	payload := func(common, last int) []byte {
		var out []byte
		for i := range 22 {
			n := common
			if i >= 20 {
				n = last
			}
			role := [2]string{"user", "assistant"}[i%2]
			out = fmt.Appendf(out, `,{"role":%q,"content":%q}`, role, fmt.Sprint(n, text[:len(text)-i]))
		}
		return fmt.Appendf(nil, `{"model":"m","messages":[%s]}`, out[1:])
	}
	type row struct {
		name         string
		model        *Model
		common, last int // increment of the numbers in the messages
	}
	rows := []row{{"repeated", m, 0, 0}, {"grown", m, 0, 1}, {"unseen", m, 1, 1}}
	for _, native := range [][2]string{
		{"DeepseekV32ForCausalLM", "deepseek_v32"}, {"DeepseekV4ForCausalLM", "deepseek_v4"},
	} {
		model, err := Load(nativeFolder(b, native[0], native[1], nil), Options{Engine: VLLM})
		if err != nil {
			b.Fatal(err)
		}
		rows = append(rows, row{"repeated/" + native[1], model, 0, 0})
	}
	for _, c := range rows {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(payload(0, 0))))
			b.ReportAllocs()
			for i := 1; b.Loop(); i++ {
				b.StopTimer()
				raw := payload(i*c.common, i*c.last)
				b.StartTimer()
				request, err := body.ParseRequest("/v1/chat/completions", raw)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := c.model.Tokenize(b.Context(), request); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		loadModel(b, "tiny-bytelevel")
	}
}

// idsOf returns the ids of each prompt.
func idsOf(prompts []Prompt) [][]kvblock.Token {
	ids := make([][]kvblock.Token, len(prompts))
	for i := range prompts {
		ids[i] = prompts[i].IDs
	}
	return ids
}
