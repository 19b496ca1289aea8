package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strings"
	"testing"
)

// TestRequestsNameKvepp: each request that kvepp makes has its name and version, so that operators of other servers see
// what asks them. A function that makes one calls useragent.Add, or hands the request to a function that does. A
// function that opens a connection of gRPC or NATS calls useragent.Text, and so does one that makes an exporter of
// spans.
func TestRequestsNameKvepp(t *testing.T) {
	opens := regexp.MustCompile(`\b(grpc\.NewClient|nats\.Connect|otlptrace(grpc|http)\.New)\(`)
	texts := regexp.MustCompile(`\buseragent\.Text\(|\bagent\(`) // the second: of internal/tracing, which calls it
	makes := regexp.MustCompile(`\bhttp\.(NewRequest|NewRequestWithContext|Get|Head|Post|PostForm)\(`)
	names := regexp.MustCompile(`\buseragent\.Add\(|\bc\.do\(`) // the second: of cmd/kvepp/drain.go, which adds it
	requests, connections := 0, 0
	goFiles(t, func(name string, text []byte) {
		if strings.HasSuffix(name, "_test.go") || ofTests.MatchString(name) ||
			strings.HasPrefix(name, "extproc/extproctest/") {
			return
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, text, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			body := text[files.Position(f.Body.Pos()).Offset:files.Position(f.Body.End()).Offset]
			if opens.Match(body) {
				connections++
				if !texts.Match(body) {
					t.Errorf("%s: %s opens a connection without useragent.Text", files.Position(f.Pos()), f.Name.Name)
				}
			}
			if !makes.Match(body) {
				continue
			}
			requests++
			if !names.Match(body) {
				t.Errorf("%s: %s makes a request without useragent.Add", files.Position(f.Pos()), f.Name.Name)
			}
		}
	})
	if requests < 8 || connections < 2 {
		t.Errorf("%d functions make requests, %d open connections: this test does not find them", requests, connections)
	}
}
