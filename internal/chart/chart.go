// Package chart draws small charts as SVG: lines, and horizontal bars. A chart has a light and a dark look, which
// follow the reader's setting (prefers-color-scheme). Renderers that do not know the setting show the light one.
//
// It holds no state. It is written here because a chart library would be the larger dependency, and none that is well
// kept writes both looks into one file.
//
// Concurrency: its functions may be called concurrently.
package chart

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Line is one line of a chart, or one step of a legend.
type Line struct {
	Name string
	// X and Y have the points, in order of X. Points that are not finite are left out.
	X, Y []float64
}

// Lines is a chart of lines.
type Lines struct {
	Title, XLabel, YLabel string
	// LogX puts X on a logarithmic scale; points at or below 0 are left out then.
	LogX bool
	// YFrom and YTo are the least range of Y. It grows with the lines.
	YFrom, YTo float64
	Lines      []Line
}

// Bar is a horizontal bar.
type Bar struct {
	Name  string
	Value float64 // from 0
}

// Bars is a chart of horizontal bars.
type Bars struct {
	Title, XLabel string
	To            float64 // end of the scale
	Log           bool    // a logarithmic scale; it begins at the power of ten below the least value above 0
	Letters       int     // of names that are shown; 0: 20
	Bars          []Bar
	// Mark, if not 0, is a vertical line with MarkName.
	Mark     float64
	MarkName string
}

// Sizes, in the units of the picture.
const (
	width       = 760
	left, right = 64, 24
	top         = 44
	plotHeight  = 280
	bottom      = 52
	legendLine  = 18
	barLine     = 26
	nameLetters = 20  // of a name that are shown
	letter      = 7.2 // room for a letter of a bar's name
)

// colors are those of lines and bars, for a light and a dark ground. After the last one they begin again, dashed.
// Source: the palette of Okabe and Ito, which color-blind readers can tell apart, lighter where the ground is dark.
var colors = []struct{ light, dark string }{
	{"#0072b2", "#4aa8e0"},
	{"#d55e00", "#ff8a3d"},
	{"#009e73", "#2fcf9f"},
	{"#b5529a", "#e08fc4"},
	{"#8a6d00", "#e6c229"},
	{"#4b5563", "#c3cad5"},
}

// frame begins a picture.
func frame(b *strings.Builder, height int, title string) {
	fmt.Fprintf(b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" `+
		`font-family="system-ui,sans-serif" font-size="12">`+"\n", width, height, width, height)
	fmt.Fprintf(b, "<title>%s</title>\n<style>\n", escape(title))
	b.WriteString(".ground{fill:#fff}.ink{fill:#1f2328}.soft{fill:#59636e}.grid{stroke:#d1d9e0}" +
		".mark{stroke:#1f2328}.halo{stroke:#fff;stroke-width:4;paint-order:stroke}\n")
	for i, c := range colors {
		fmt.Fprintf(b, ".l%d{stroke:%s;fill:none}.b%d{fill:%s}\n", i, c.light, i, c.light)
	}
	b.WriteString("@media (prefers-color-scheme:dark){\n.ground{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}" +
		".grid{stroke:#3d444d}.mark{stroke:#e6edf3}.halo{stroke:#0d1117}\n")
	for i, c := range colors {
		fmt.Fprintf(b, ".l%d{stroke:%s}.b%d{fill:%s}\n", i, c.dark, i, c.dark)
	}
	fmt.Fprintf(b, "}\n</style>\n<rect class=\"ground\" width=\"%d\" height=\"%d\"/>\n", width, height)
	text(b, left, 24, "start", "ink", 15, title)
}

// text writes text at a point. anchor is start, middle or end.
func text(b *strings.Builder, x, y float64, anchor, class string, size int, s string) {
	fmt.Fprintf(b, `<text x="%s" y="%s" text-anchor="%s" class="%s" font-size="%d">%s</text>`+"\n",
		short(x), short(y), anchor, class, size, escape(s))
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes everything
	return b.String()
}

func short(v float64) string { return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64) }

// cut shortens a name that would not fit to so many letters.
func cut(name string, most int) string {
	if letters := []rune(name); len(letters) > most {
		return string(letters[:most-1]) + "…"
	}
	return name
}

// Save writes a chart to a file. It creates the file's folder.
func Save(path string, c interface{ Write(to io.Writer) error }) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(c.Write(f), f.Close())
}

func line(b *strings.Builder, class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(b, `<line class="%s" x1="%s" y1="%s" x2="%s" y2="%s"/>`+"\n", class, short(x1), short(y1), short(x2),
		short(y2))
}

// scale maps values to positions.
type scale struct {
	from, to   float64 // values
	start, end float64 // positions
	log        bool
}

func (s *scale) at(v float64) float64 {
	from, to := s.from, s.to
	if s.log {
		from, to, v = math.Log(from), math.Log(to), math.Log(v)
	}
	return s.start + (v-from)/(to-from)*(s.end-s.start)
}

// ticks returns round values within the scale.
func (s *scale) ticks() (values []float64) {
	if s.log {
		if values = s.logTicks(); len(values) > 9 { // leave room for the labels
			values = decades(values)
		}
		if len(values) > 1 {
			return values
		}
	}
	step := math.Pow(10, math.Floor(math.Log10((s.to-s.from)/4)))
	for _, m := range []float64{5, 2} {
		if (s.to-s.from)/(m*step) >= 4 {
			step *= m
			break
		}
	}
	values = nil
	for k := math.Ceil(s.from/step - 1e-9); k*step <= s.to+step*1e-9; k++ {
		values = append(values, k*step)
	}
	return values
}

// logTicks returns 1, 2 and 5 of each decade.
func (s *scale) logTicks() (values []float64) {
	for e := math.Floor(math.Log10(s.from)); ; e++ {
		for _, m := range []float64{1, 2, 5} {
			switch v := m * math.Pow(10, e); {
			case v > s.to*1.0001:
				return values
			case v >= s.from*0.9999:
				values = append(values, v)
			}
		}
	}
}

// decades keeps the powers of ten.
func decades(values []float64) (kept []float64) {
	for _, v := range values {
		if e := math.Log10(v); math.Abs(e-math.Round(e)) < 1e-9 {
			kept = append(kept, v)
		}
	}
	return kept
}

func label(v float64) string { return strconv.FormatFloat(v+0, 'g', 4, 64) } // + 0: not -0

// Write writes the chart.
func (c *Lines) Write(to io.Writer) error {
	x, y := c.scales()
	height := top + plotHeight + bottom + legendLine*((len(c.Lines)+3)/4)
	var b strings.Builder
	frame(&b, height, c.Title)
	for _, v := range y.ticks() {
		line(&b, "grid", x.start, y.at(v), x.end, y.at(v))
		text(&b, x.start-8, y.at(v)+4, "end", "soft", 12, label(v))
	}
	for _, v := range x.ticks() {
		line(&b, "grid", x.at(v), y.start, x.at(v), y.end)
		text(&b, x.at(v), y.start+18, "middle", "soft", 12, label(v))
	}
	text(&b, (x.start+x.end)/2, y.start+36, "middle", "soft", 12, c.XLabel)
	text(&b, left, top-6, "start", "soft", 12, c.YLabel)
	for i, l := range c.Lines {
		dash := ""
		if i >= len(colors) {
			dash = ` stroke-dasharray="6 4"`
		}
		style := fmt.Sprintf(`class="l%d" stroke-width="2" stroke-linejoin="round"%s`, i%len(colors), dash)
		fmt.Fprintf(&b, `<polyline %s points="`, style)
		for k := range l.X {
			if c.shown(l.X[k], l.Y[k]) {
				fmt.Fprintf(&b, "%s,%s ", short(x.at(l.X[k])), short(y.at(l.Y[k])))
			}
		}
		b.WriteString("\"/>\n")
		lx, ly := float64(left+i%4*168), float64(top+plotHeight+bottom+i/4*legendLine)
		fmt.Fprintf(&b, `<path %s d="M%s %sh24"/>`+"\n", style, short(lx), short(ly-4))
		text(&b, lx+30, ly, "start", "ink", 12, cut(l.Name, nameLetters))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(to, b.String())
	return err
}

// shown reports whether a point can be drawn.
func (c *Lines) shown(x, y float64) bool {
	return !math.IsNaN(x+y) && !math.IsInf(x+y, 0) && (!c.LogX || x > 0)
}

func (c *Lines) scales() (x, y scale) {
	x = scale{from: math.Inf(1), to: math.Inf(-1), start: left, end: width - right, log: c.LogX}
	y = scale{from: c.YFrom, to: c.YTo, start: top + plotHeight, end: top}
	for _, l := range c.Lines {
		for k := range l.X {
			if c.shown(l.X[k], l.Y[k]) {
				x.from, x.to = min(x.from, l.X[k]), max(x.to, l.X[k])
				y.from, y.to = min(y.from, l.Y[k]), max(y.to, l.Y[k])
			}
		}
	}
	if x.from > x.to { // no point
		x.from, x.to = 1, 10
	}
	if x.to <= x.from*1.0001 {
		x.to = x.from + max(math.Abs(x.from), 1)
	}
	if y.to <= y.from {
		y.to = y.from + 1
	}
	return x, y
}

// Write writes the chart.
func (c *Bars) Write(to io.Writer) error {
	letters := c.Letters
	if letters <= 0 {
		letters = nameLetters
	}
	room := 6 + letter*float64(letters)
	x := c.scale(room)
	end := float64(top + barLine*len(c.Bars))
	var b strings.Builder
	frame(&b, int(end)+bottom+8, c.Title)
	for _, v := range x.ticks() {
		line(&b, "grid", x.at(v), top, x.at(v), end)
		text(&b, x.at(v), end+18, "middle", "soft", 12, label(v))
	}
	text(&b, (x.start+x.end)/2, end+36, "middle", "soft", 12, c.XLabel)
	if c.Mark > 0 {
		fmt.Fprintf(&b, `<path class="mark" stroke-dasharray="4 3" d="M%s %dV%s"/>`+"\n", short(x.at(c.Mark)), top-4,
			short(end))
		text(&b, x.at(c.Mark), top-8, "end", "soft", 12, c.MarkName)
	}
	for i, v := range c.Bars {
		y := float64(top + i*barLine)
		text(&b, room-8, y+17, "end", "ink", 12, cut(v.Name, letters))
		fmt.Fprintf(&b, `<rect class="b0" x="%s" y="%s" width="%s" height="%d"/>`+"\n", short(x.start), short(y+4),
			short(max(x.at(max(v.Value, x.from))-x.start, 0)), barLine-8)
		text(&b, x.at(max(v.Value, x.from))+6, y+17, "start", "ink halo", 12, c.value(v.Value))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(to, b.String())
	return err
}

// scale returns the scale of the values, for names with so much room.
func (c *Bars) scale(room float64) scale {
	x := scale{to: c.To, start: room, end: width - right - 50, log: c.Log}
	least := math.Inf(1)
	for _, v := range c.Bars {
		x.to = max(x.to, v.Value)
		if v.Value > 0 {
			least = min(least, v.Value)
		}
	}
	if !(x.to > 0) {
		x.to = 1
	}
	if c.Log {
		x.from = math.Pow(10, math.Floor(math.Log10(min(least, x.to))))
		x.to = max(x.to, 10*x.from)
	}
	return x
}

// value writes the value of a bar. On a logarithmic scale values differ much, and have at least three digits.
func (c *Bars) value(v float64) string {
	digits := 1
	if c.Log {
		digits = min(max(2-int(math.Floor(math.Log10(max(v, 1e-9)))), 0), 4)
	}
	return strconv.FormatFloat(v, 'f', digits, 64)
}
