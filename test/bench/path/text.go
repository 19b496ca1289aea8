package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
)

// words are the words of test/bench/words.txt, with frequencies by Zipf's law.
type words []string

func readWords(root string) (words, error) {
	list, err := os.ReadFile(filepath.Join(root, "test/bench/words.txt"))
	if err != nil {
		return nil, err
	}
	var out words
	for rank, word := range strings.Fields(string(list)) {
		for range 1 + 2000/(rank+3) {
			out = append(out, word)
		}
	}
	return out, nil
}

// writer writes text: some words are invented, and lines end now and then.
type writer struct {
	rand  *rand.Rand
	words words
	store []byte // earlier text
}

var writers atomic.Uint64

// writer returns a writer with other texts than any before it.
func (w words) writer() *writer {
	return &writer{rand: rand.New(rand.NewPCG(writers.Add(1), 1)), words: w}
}

// text appends about n bytes of text, as it stands in a JSON string.
func (w *writer) text(out []byte, n int) []byte {
	for end := len(out) + n; len(out) < end; {
		switch at := w.rand.IntN(100); {
		case at < 2:
			out = fmt.Appendf(out, "%c%x", 'a'+w.rand.IntN(26), w.rand.IntN(1<<16))
		case at < 6:
			out = append(out, `.\n`...)
		default:
			out = append(out, w.words[w.rand.IntN(len(w.words))]...)
		}
		out = append(out, ' ')
	}
	return out
}

// chat appends the body of a chat of about n bytes.
func (w *writer) chat(out []byte, n int, stream bool) []byte {
	out = fmt.Appendf(out, `{"model":"m","stream":%t,"messages":[{"role":"user","content":"`, stream)
	return append(w.text(out, max(n-len(out)-4, 0)), `"}]}`...)
}

// cut is chat for large bodies: it cuts the text out of a longer one, so that the client's work is small. The text
// begins with unique words, so that it is new.
func (w *writer) cut(n int) []byte {
	if len(w.store) < 2*n {
		w.store = w.text(nil, 2*n)
	}
	out := append(make([]byte, 0, n+100), `{"model":"m","stream":false,"messages":[{"role":"user","content":"`...)
	out = fmt.Appendf(out, "%x ", w.rand.Uint64())
	at := w.rand.IntN(n)
	piece := w.store[at : at+max(n-len(out)-4, 0)]
	out = append(out, bytes.TrimRight(piece, `\`)...)
	return append(out, `"}]}`...)
}

// grown returns a chat with a response and a further question added.
func (w *writer) grown(chat []byte) []byte {
	out := append([]byte(nil), chat[:len(chat)-len("]}")]...)
	out = w.text(append(out, `,{"role":"assistant","content":"`...), 400)
	out = w.text(append(out, `"},{"role":"user","content":"`...), 400)
	return append(out, `"}]}`...)
}
