package secrets

import (
	"fmt"
	"strings"
	"sync/atomic"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
)

// Token is a secret that a listener or an engine requires: the latest content of its file that could be used. A nil
// *Token requires nothing.
type Token struct {
	flag, file string
	current    atomic.Pointer[string]
}

// Token reads a file, and follows it. It returns nil without a file. flag is the flag's name with dashes, for errors.
func (f *Files) Token(flag, file string) (*Token, error) {
	if file == "" {
		return nil, nil
	}
	t := &Token{flag: flag, file: file}
	if err := f.add(&followed{load: t.load, refused: &f.refusedTokens,
		changed:  "a new token was read; the earlier one is no longer valid",
		rejected: "a file with a token is refused; the earlier token stays"}); err != nil {
		return nil, err
	}
	return t, nil
}

// Text returns the secret; "" for nil.
func (t *Token) Text() string {
	if t == nil {
		return ""
	}
	return *t.current.Load()
}

func (t *Token) load() (news []any, err error) {
	text, err := ReadToken(t.flag, t.file)
	if err != nil {
		return nil, err
	}
	if before := t.current.Swap(&text); before != nil && *before == text {
		return nil, nil
	}
	return []any{"flag", t.flag}, nil
}

// ReadToken returns the secret in a file; "" without a file. flag is the flag's name with dashes, for errors.
func ReadToken(flag, file string) (string, error) {
	if file == "" {
		return "", nil
	}
	text, err := boundedfile.Read(file, flags.MaxFileBytes)
	if err != nil {
		return "", fmt.Errorf("%s: %w", flag, err)
	}
	token := strings.TrimSpace(string(text))
	switch {
	case token == "":
		return "", fmt.Errorf("%s: the file is empty; put a secret into it, in one line", flag)
	case strings.ContainsAny(token, "\r\n"): // a header value cannot hold it
		return "", fmt.Errorf("%s: the file has several lines; put the secret into it alone", flag)
	}
	return token, nil
}
