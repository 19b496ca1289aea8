// Package chart draws lines and horizontal bars as SVG, with a light and a dark look (prefers-color-scheme). It is
// written here because no chart library that is well kept writes both looks into one file.
//
// Concurrency: it holds no state.
package chart

import (
	"encoding/xml"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Line has points in order of X. Those that are not finite, or not above 0 on a logarithmic scale, are left out.
type Line struct {
	Name string
	X, Y []float64
}

// Lines is a chart of lines, whose Y goes at least from 0 to YTo.
type Lines struct {
	Title, XLabel, YLabel string
	LogX                  bool // X is logarithmic
	YTo                   float64
	Lines                 []Line
}

// Bar is a bar from 0 to Value.
type Bar struct {
	Name  string
	Value float64
}

// Bars is a chart of horizontal bars.
type Bars struct {
	Title, XLabel string
	To            float64 // least end of the scale
	Log           bool    // a logarithmic scale; it begins at the power of ten below the least value above 0
	Letters       int     // of names that are shown; 0: 20
	Bars          []Bar
	Mark          float64 // a vertical line with MarkName; 0: none
	MarkName      string
}

// Save writes a chart to a file. It creates the file's folder.
func Save(path string, c fmt.Stringer) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(c.String()), 0o644)
}

const ( // in the units of the picture
	width, left, right          = 760, 64, 24
	top, plotHeight, bottom     = 44, 280, 52
	legendLine, barLine, letter = 18, 26, 7.2
	nameLetters                 = 20
)

// colors are those of lines and bars, on a light and a dark ground. After the last one they begin again, dashed.
// Source: the palette of Okabe and Ito, which color-blind readers can tell apart, lighter where the ground is dark.
var colors = [][2]string{{"#0072b2", "#4aa8e0"}, {"#d55e00", "#ff8a3d"}, {"#009e73", "#2fcf9f"},
	{"#b5529a", "#e08fc4"}, {"#8a6d00", "#e6c229"}, {"#4b5563", "#c3cad5"}}

type picture struct{ strings.Builder }

func (p *picture) begin(height int, title string) {
	fmt.Fprintf(p, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" `+
		`font-family="system-ui,sans-serif" font-size="12">`+"\n<title>%s</title>\n<style>\n", width, height, width,
		height, escape(title))
	for look, ground := range [][5]string{{"#fff", "#1f2328", "#59636e", "#d1d9e0", ""},
		{"#0d1117", "#e6edf3", "#9198a1", "#3d444d", "@media (prefers-color-scheme:dark){\n"}} {
		fmt.Fprintf(p, "%s.ground{fill:%s}.ink{fill:%s}.soft{fill:%s}.grid{stroke:%s}.mark{stroke:%s}"+
			".halo{stroke:%s;stroke-width:4;paint-order:stroke}.title{font-size:15px}\n", ground[4], ground[0],
			ground[1], ground[2], ground[3], ground[1], ground[0])
		for i, c := range colors {
			fmt.Fprintf(p, ".l%d{stroke:%s;fill:none}.b%d{fill:%s}\n", i, c[look], i, c[look])
		}
	}
	fmt.Fprintf(p, "}\n</style>\n<rect class=\"ground\" width=\"%d\" height=\"%d\"/>\n", width, height)
	p.text(left, 24, "start", "ink title", title)
}

// text writes text at a point. anchor is start, middle or end.
func (p *picture) text(x, y float64, anchor, class, text string) {
	fmt.Fprintf(p, `<text x="%.1f" y="%.1f" text-anchor="%s" class="%s">%s</text>`+"\n", x, y, anchor, class,
		escape(text))
}

func (p *picture) line(class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(p, `<line class="%s" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`+"\n", class, x1, y1, x2, y2)
}

// xAxis writes the grid from above to below, and the labels under it.
func (p *picture) xAxis(x *scale, above, below float64, label string) {
	for _, v := range x.ticks() {
		p.line("grid", x.at(v), below, x.at(v), above)
		p.text(x.at(v), below+18, "middle", "soft", short(v))
	}
	p.text((x.start+x.end)/2, below+36, "middle", "soft", label)
}

func (p *picture) end() string { return p.String() + "</svg>\n" }

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes everything
	return b.String()
}

func short(v float64) string { return strconv.FormatFloat(v+0, 'g', 4, 64) } // + 0: not -0

// cut shortens a name to so many letters.
func cut(name string, most int) string {
	if letters := []rune(name); len(letters) > most {
		return string(letters[:most-1]) + "…"
	}
	return name
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

// ticks returns round values within the scale, so many that their labels do not touch.
func (s *scale) ticks() (values []float64) {
	for _, factors := range [][]float64{{1, 2, 5}, {1}} {
		for e := math.Floor(math.Log10(s.from)); s.log && math.Pow(10, e) <= s.to; e++ {
			for _, m := range factors {
				if v := m * math.Pow(10, e); v >= s.from*0.9999 && v <= s.to*1.0001 {
					values = append(values, v)
				}
			}
		}
		if len(values) > 1 && len(values) <= 9 {
			return values
		}
		values = nil
	}
	step := math.Pow(10, math.Floor(math.Log10((s.to-s.from)/4)))
	for _, m := range []float64{5, 2} {
		if (s.to-s.from)/(m*step) >= 4 {
			step *= m
			break
		}
	}
	for k := math.Ceil(s.from/step - 1e-9); k*step <= s.to+step*1e-9; k++ {
		values = append(values, k*step)
	}
	return values
}

// String returns the SVG.
func (c *Lines) String() string {
	x := scale{from: math.Inf(1), to: math.Inf(-1), start: left, end: width - right, log: c.LogX}
	y := scale{to: c.YTo, start: top + plotHeight, end: top}
	shown := make([]Line, len(c.Lines))
	for i, l := range c.Lines {
		for k, v := range l.X {
			if w := l.Y[k]; !math.IsNaN(v+w) && !math.IsInf(v+w, 0) && (!c.LogX || v > 0) {
				shown[i].X, shown[i].Y = append(shown[i].X, v), append(shown[i].Y, w)
				x.from, x.to, y.from, y.to = min(x.from, v), max(x.to, v), min(y.from, w), max(y.to, w)
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
	var p picture
	p.begin(top+plotHeight+bottom+legendLine*((len(c.Lines)+3)/4), c.Title)
	for _, v := range y.ticks() {
		p.line("grid", x.start, y.at(v), x.end, y.at(v))
		p.text(x.start-8, y.at(v)+4, "end", "soft", short(v))
	}
	p.xAxis(&x, y.end, y.start, c.XLabel)
	p.text(left, top-6, "start", "soft", c.YLabel)
	for i, l := range shown {
		style := fmt.Sprintf(`class="l%d" stroke-width="2" stroke-linejoin="round"`, i%len(colors))
		if i >= len(colors) {
			style += ` stroke-dasharray="6 4"`
		}
		fmt.Fprintf(&p, `<polyline %s points="`, style)
		for k := range l.X {
			fmt.Fprintf(&p, "%.1f,%.1f ", x.at(l.X[k]), y.at(l.Y[k]))
		}
		lx, ly := float64(left+i%4*168), float64(top+plotHeight+bottom+i/4*legendLine)
		fmt.Fprintf(&p, "\"/>\n"+`<path %s d="M%.1f %.1fh24"/>`+"\n", style, lx, ly-4)
		p.text(lx+30, ly, "start", "ink", cut(c.Lines[i].Name, nameLetters))
	}
	return p.end()
}

// String returns the SVG.
func (c *Bars) String() string {
	letters := c.Letters
	if letters <= 0 {
		letters = nameLetters
	}
	x := scale{to: c.To, start: 6 + letter*float64(letters), end: width - right - 50, log: c.Log}
	least := math.Inf(1)
	for _, v := range c.Bars {
		if x.to = max(x.to, v.Value); v.Value > 0 {
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
	var p picture
	end := float64(top + barLine*len(c.Bars))
	p.begin(int(end)+bottom+8, c.Title)
	p.xAxis(&x, top, end, c.XLabel)
	if c.Mark > 0 {
		fmt.Fprintf(&p, `<path class="mark" stroke-dasharray="4 3" d="M%.1f %dV%.1f"/>`+"\n", x.at(c.Mark), top-4, end)
		p.text(x.at(c.Mark), top-8, "end", "soft", c.MarkName)
	}
	for i, v := range c.Bars {
		y, to, digits := float64(top+i*barLine), x.at(max(v.Value, x.from)), 1
		if c.Log { // values differ much: each has at least three digits
			digits = min(max(2-int(math.Floor(math.Log10(max(v.Value, 1e-9)))), 0), 4)
		}
		p.text(x.start-8, y+17, "end", "ink", cut(v.Name, letters))
		fmt.Fprintf(&p, `<rect class="b0" x="%.1f" y="%.1f" width="%.1f" height="%d"/>`+"\n", x.start, y+4,
			max(to-x.start, 0), barLine-8)
		p.text(to+6, y+17, "start", "ink halo", strconv.FormatFloat(v.Value, 'f', digits, 64))
	}
	return p.end()
}
