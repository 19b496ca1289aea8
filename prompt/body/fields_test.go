package body

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestFieldsAreThoseRead reads the sources that look up fields of a request's Body, and compares the field names with
// the tables. A look-up is a call with a name and the body: an expression that ends in .Body, or a variable with one of
// the names that bodies have in those packages.
func TestFieldsAreThoseRead(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	bodies := map[string]bool{"b": true, "body": true, "payload": true, "object": true}
	elsewhere := map[string]bool{ // looked up in other objects with the same variable names
		"type": true,
	}
	read := map[string]string{}
	for _, dir := range []string{".", "..", "../remote", "../../router", "../../extproc",
		"../../serve/check"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			var loops []*ast.RangeStmt
			lists := map[string][]string{} // the lists that variables are set to
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.RangeStmt:
					loops = append(loops, n)
				case *ast.AssignStmt:
					for i, to := range n.Lhs {
						variable, isName := to.(*ast.Ident)
						if of, isList := n.Rhs[min(i, len(n.Rhs)-1)].(*ast.CompositeLit); isName && isList {
							lists[variable.Name] = append(lists[variable.Name], literals(of.Elts)...)
						}
					}
				}
				return true
			})
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				args := call.Args
				if method, ok := call.Fun.(*ast.SelectorExpr); ok && method.Sel.Name == "Get" {
					args = append([]ast.Expr{method.X}, args...)
				}
				if len(args) < 2 {
					return true
				}
				switch of := args[0].(type) {
				case *ast.SelectorExpr:
					ok = of.Sel.Name == "Body"
				case *ast.Ident:
					ok = bodies[of.Name]
				default:
					ok = false
				}
				if !ok {
					return true
				}
				names := literals(args[1:2])
				if variable, isName := args[1].(*ast.Ident); isName {
					for _, loop := range loops { // the innermost is the last
						through, isName := loop.Value.(*ast.Ident)
						if !isName || through.Name != variable.Name || call.Pos() < loop.Pos() ||
							loop.End() < call.End() {
							continue
						}
						switch of := loop.X.(type) {
						case *ast.CompositeLit:
							names = literals(of.Elts)
						case *ast.Ident:
							names = lists[of.Name]
						}
						if method, isMethod := call.Fun.(*ast.SelectorExpr); isMethod && method.Sel.Name == "Get" &&
							len(names) == 0 {
							t.Errorf("%s: the fields read here are not recognised; use literal names",
								set.Position(call.Pos()))
						}
					}
				}
				for _, field := range names {
					read[field] = set.Position(call.Pos()).String()
				}
				return true
			})
		}
	}
	if len(read) < 35 {
		t.Fatalf("found only %d fields: %v", len(read), slices.Sorted(maps.Keys(read)))
	}
	for field, at := range read {
		if _, known := topLevelFields[field]; !known && !elsewhere[field] {
			t.Errorf("%s: the field %q is read but not in the table of fields, so that it is always absent", at, field)
		}
	}
	for field := range topLevelFields {
		if read[field] == "" {
			t.Errorf("the field %q is in the table, but no code reads it", field)
		}
	}
}

func literals(of []ast.Expr) (texts []string) {
	for _, e := range of {
		if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
			text, _ := strconv.Unquote(l.Value)
			texts = append(texts, text)
		}
	}
	return texts
}
