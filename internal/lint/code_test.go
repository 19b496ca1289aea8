package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	maxColumns    = 120 // a tab counts as 4
	maxLines      = 100 // of a function
	maxComplexity = 30  // cyclomatic, of a function
)

// goFiles calls visit with each Go file of the tree: its path below the root, and its text.
func goFiles(t *testing.T, visit func(name string, text []byte)) {
	t.Helper()
	for _, name := range treeFiles(t) {
		if !strings.HasSuffix(name, ".go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		visit(name, text)
	}
}

// generated matches the comment of files that a program writes.
var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// TestLineLength refuses long lines, except in generated files. A string literal can be split.
func TestLineLength(t *testing.T) {
	goFiles(t, func(name string, text []byte) {
		if generated.Match(text) {
			return
		}
		for i, line := range strings.Split(string(text), "\n") {
			if columns := utf8.RuneCountInString(line) + 3*strings.Count(line, "\t"); columns > maxColumns {
				t.Errorf("%s:%d: %d columns, want at most %d", name, i+1, columns, maxColumns)
			}
		}
	})
}

// explained is what the comment of a function says that may be longer or more complex than the limits.
var explained = regexp.MustCompile(`(?i)\b(one|single) (function|switch|table)\b|\bnot split\b`)

// TestFunctions refuses functions that are too long or too complex. A function that must be so says why in its comment.
func TestFunctions(t *testing.T) {
	goFiles(t, func(name string, text []byte) {
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, text, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil || explained.MatchString(f.Doc.Text()) {
				continue
			}
			at := files.Position(f.Pos())
			lines := files.Position(f.End()).Line - at.Line + 1
			complexity := cyclomatic(f.Body)
			isTest := strings.HasSuffix(name, "_test.go") // a table of cases may be long
			if lines > maxLines && !isTest || complexity > maxComplexity {
				t.Errorf("%s:%d: %s has %d lines and a cyclomatic complexity of %d, want at most %d and %d: "+
					"split it, or say in its comment why it is one function", name, at.Line, f.Name.Name, lines,
					complexity, maxLines, maxComplexity)
			}
		}
	})
}

// cyclomatic counts the ways through a function: one, and one for each branch.
func cyclomatic(body ast.Node) int {
	n := 1
	ast.Inspect(body, func(node ast.Node) bool {
		switch x := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if x.List != nil {
				n++
			}
		case *ast.CommClause:
			if x.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if x.Op == token.LAND || x.Op == token.LOR {
				n++
			}
		case *ast.FuncLit:
			return false // its own function
		}
		return true
	})
	return n
}
