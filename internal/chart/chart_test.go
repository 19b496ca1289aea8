package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// elements parses an SVG, and returns the elements of a kind with their attributes.
func elements(t *testing.T, text string, kind string) (found []map[string]string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatalf("no XML: %v\n%s", err, text)
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == kind {
			attributes := map[string]string{}
			for _, a := range e.Attr {
				attributes[a.Name.Local] = a.Value
			}
			found = append(found, attributes)
		}
	}
}

// TestLines: each line is drawn within the picture, also with points and names that cannot be drawn.
func TestLines(t *testing.T) {
	long := strings.Repeat("wide ", 20)
	for _, c := range []Chart{
		{Title: "a", Lines: []Line{{"one", []float64{0, 1, 2}, []float64{3, 5, 4}},
			{"two", []float64{0, 2}, []float64{1, 9}}}},
		{Title: "<&\">", Log: true, Lines: []Line{{"<b>", []float64{-1, 0, 1, 1e5, math.NaN(), math.Inf(1)},
			[]float64{1, 1, 0, 1, 1, 1}}, {long, []float64{3}, []float64{math.Inf(-1)}}}},
		{Title: "nothing"},
		{Title: "a point", Log: true, To: 1, Lines: []Line{{"p", []float64{5}, []float64{0}}}},
		{Title: "many", Lines: make([]Line, 11)},
		{Title: "narrow", Log: true, Lines: []Line{{"n", []float64{20, 20.1, 24}, []float64{0, 1, 2}}}},
	} {
		text := c.String()
		svg := elements(t, text, "svg")[0]
		width, _ := strconv.ParseFloat(svg["width"], 64)
		height, _ := strconv.ParseFloat(svg["height"], 64)
		lines := elements(t, text, "polyline")
		if len(lines) != len(c.Lines) {
			t.Errorf("%s: %d lines of %d", c.Title, len(lines), len(c.Lines))
		}
		for _, l := range lines {
			for _, point := range strings.Fields(l["points"]) {
				x, y, _ := strings.Cut(point, ",")
				px, errX := strconv.ParseFloat(x, 64)
				py, errY := strconv.ParseFloat(y, 64)
				if errX != nil || errY != nil || !(px >= 0 && px <= width && py >= 0 && py <= height) {
					t.Errorf("%s: the point %q of %vx%v", c.Title, point, width, height)
				}
			}
		}
		for _, label := range elements(t, text, "text") {
			if x, err := strconv.ParseFloat(label["x"], 64); err != nil || !(x >= 0 && x <= width) {
				t.Errorf("%s: text at %q", c.Title, label["x"])
			}
		}
	}
}

// TestTicks: a scale has labels, and not so many that they touch.
func TestTicks(t *testing.T) {
	for _, s := range []scale{{from: 0, to: 1}, {from: 0, to: 97}, {from: 3, to: 3.2}, {from: 1, to: 10, log: true},
		{from: 0.5, to: 1e6, log: true}, {from: 12, to: 900, log: true},
		{from: 20, to: 24, log: true}} {
		ticks := s.ticks()
		if len(ticks) < 2 || len(ticks) > 11 {
			t.Errorf("%+v: %v", s, ticks)
		}
		for _, v := range ticks {
			if v < s.from*0.999 || v > s.to*1.001 {
				t.Errorf("%+v: a tick at %v", s, v)
			}
		}
	}
}

// TestBars: a bar is as long as its value, and the dark look is in the file.
func TestBars(t *testing.T) {
	c := Chart{Title: "t", To: 100, Bars: []Bar{{"half", 50}, {"all", 100}, {"none", 0}}}
	var widths []float64
	for _, r := range elements(t, c.String(), "rect")[1:] {
		w, _ := strconv.ParseFloat(r["width"], 64)
		widths = append(widths, w)
	}
	if len(widths) != 3 || widths[1] < 300 || math.Abs(widths[0]-widths[1]/2) > 0.1 || widths[2] != 0 {
		t.Errorf("bars %v", widths)
	}
	if !strings.Contains(c.String(), "prefers-color-scheme:dark") {
		t.Error("no dark look")
	}
	elements(t, (&Chart{Title: "none"}).String(), "svg")
}

// TestSave: longer names get more room, and Save creates the folder.
func TestSave(t *testing.T) {
	c := Chart{Title: "t", Bars: []Bar{{strings.Repeat("decade", 7), 15}, {"two", 150}, {"three", 1500}}}
	file := filepath.Join(t.TempDir(), "new", "c.svg")
	if err := c.Save(file); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range elements(t, string(text), "rect")[1:] {
		if x, _ := strconv.ParseFloat(r["x"], 64); x < 250 {
			t.Errorf("names have room up to %v", x)
		}
	}
	for _, want := range []string{">15<", ">150<", ">1500<"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no value %s", want)
		}
	}
	if err := c.Save(file + "/x.svg"); err == nil {
		t.Error("a file is taken for a folder")
	}
}
