// Package chart draws lines or horizontal bars as SVG, with a light and a dark look (prefers-color-scheme). It is
// written here because no chart library that is well kept writes both looks into one file. It holds no state.
package chart

import (
	"cmp"
	_ "embed"
	"fmt"
	"html"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// Chart is a chart of lines or of bars.
type Chart struct {
	Title, XLabel, YLabel string
	Log                   bool    // X of lines is logarithmic
	To                    float64 // least end of Y, which begins at 0; of bars, of X
	Lines                 []Line
	Bars                  []Bar
}

// Line has points in order of X. Those that are not finite, or not above 0 on a logarithmic scale, are left out.
type Line struct {
	Name string
	X, Y []float64
}

// Bar is a bar from 0 to Value.
type Bar struct {
	Name  string
	Value float64
}

// Save writes a chart to a file. It creates the file's folder.
func (c *Chart) Save(path string) error {
	return cmp.Or(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(c.String()), 0o644))
}

// head begins a picture. Its palette is Okabe's and Ito's, which color-blind readers can tell apart.
//
//go:embed head.svg
var head string

const top, plot, bar, letter = 44, 280, 26, 7.2 // heights in the units of the picture, and the width of a letter

// scale maps values to positions.
type scale struct {
	from, to, start, end float64
	log                  bool
}

func (s scale) at(v float64) float64 {
	if s.log {
		s.from, s.to, v = math.Log(s.from), math.Log(s.to), math.Log(v)
	}
	return s.start + (v-s.from)/(s.to-s.from)*(s.end-s.start)
}

// ticks returns round values within the scale, so many that their labels do not touch.
func (s scale) ticks() (values []float64) {
	for e := math.Floor(math.Log10(s.from)); s.log && math.Pow(10, e) <= s.to; e++ {
		for _, m := range []float64{1, 2, 5} {
			if v := m * math.Pow(10, e); v >= s.from*0.9999 && v <= s.to*1.0001 && (m == 1 || s.to < 500*s.from) {
				values = append(values, v)
			}
		}
	}
	step := math.Pow(10, math.Floor(math.Log10(s.to-s.from))-1)
	for i := 0; len(values) < 2 || len(values) > 11; i++ { // steps of 1, 2, 5, 10
		values = nil
		for k := math.Ceil(s.from/step - 1e-9); k*step <= s.to+step*1e-9; k++ {
			values = append(values, k*step)
		}
		step *= 2 + float64(i%3%2)/2
	}
	return values
}

type picture struct{ strings.Builder }

func (p *picture) add(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

func (p *picture) text(x, y float64, anchor, class, text string) {
	p.add(`<text x="%.1f" y="%.1f" text-anchor="%s" class="%s">%s</text>`, x, y, anchor, class, html.EscapeString(text))
}

// begin draws all but lines, bars and Y. end is where the plot ends, and below what comes below it.
func (c *Chart) begin(x scale, end, below int) *picture {
	p := &picture{}
	p.add(head, end+60+below, html.EscapeString(c.Title))
	for _, v := range x.ticks() {
		p.add(`<path class="grid" d="M%.1f %dV%d"/>`, x.at(v), end, top)
		p.text(x.at(v), float64(end+18), "middle", "soft", fmt.Sprintf("%.4g", v))
	}
	p.text((x.start+x.end)/2, float64(end+36), "middle", "soft", c.XLabel)
	p.text(64, top-6, "start", "soft", c.YLabel)
	return p
}

// String returns the SVG.
func (c *Chart) String() string {
	if len(c.Bars) > 0 {
		return c.bars()
	}
	x, y := scale{math.Inf(1), math.Inf(-1), 64, 736, c.Log}, scale{to: c.To, start: top + plot, end: top}
	shown := make([]Line, len(c.Lines))
	for i, l := range c.Lines {
		for k, v := range l.X {
			if w := l.Y[k]; math.Abs(v)+math.Abs(w) < math.Inf(1) && (!c.Log || v > 0) {
				shown[i].X, shown[i].Y = append(shown[i].X, v), append(shown[i].Y, w)
				x.from, x.to, y.from, y.to = min(x.from, v), max(x.to, v), min(y.from, w), max(y.to, w)
			}
		}
	}
	if x.to <= x.from*1.0001 { // one point, or none
		x.from, x.to = min(x.from, 1), max(x.to, 1)+1
	}
	y.to = cmp.Or(max(y.to, y.from+1e-9*math.Abs(y.from)), 1)
	p := c.begin(x, top+plot, 18*((len(shown)+3)/4))
	for _, v := range y.ticks() {
		p.add(`<path class="grid" d="M64 %.1fH736"/>`, y.at(v))
		p.text(56, y.at(v)+4, "end", "soft", fmt.Sprintf("%.4g", v))
	}
	for i, l := range shown {
		style := fmt.Sprintf(`class="line" stroke="var(--%d)" stroke-dasharray="%d"`, i%6, 6*min(i/6, 1))
		var points strings.Builder
		for k, v := range l.X {
			fmt.Fprintf(&points, "%.1f,%.1f ", x.at(v), y.at(l.Y[k]))
		}
		lx, ly := float64(64+i%4*168), float64(top+plot+56+i/4*18)
		p.add(`<polyline %s points="%s"/><path %[1]s d="M%.1[3]f %.1[4]fh24"/>`, style, points.String(), lx, ly-4)
		p.text(lx+30, ly, "start", "ink", fmt.Sprintf("%.20s", c.Lines[i].Name))
	}
	return p.String() + "</svg>\n"
}

func (c *Chart) bars() string {
	x, letters := scale{to: c.To, end: 686}, 0
	for _, b := range c.Bars {
		x.to, letters = max(x.to, b.Value), max(letters, min(len([]rune(b.Name)), 60))
	}
	x.start, x.to = 14+letter*float64(letters), cmp.Or(x.to, 1)
	p := c.begin(x, top+bar*len(c.Bars), 0)
	for i, b := range c.Bars {
		y, width := float64(top+i*bar), x.at(b.Value)-x.start
		p.text(x.start-8, y+17, "end", "ink", fmt.Sprintf("%.60s", b.Name))
		p.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%d" fill="var(--0)"/>`, x.start, y+4, width, bar-8)
		p.text(x.start+width+6, y+17, "start", "value", fmt.Sprintf("%.4g", b.Value))
	}
	return p.String() + "</svg>\n"
}
