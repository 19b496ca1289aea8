// Command charts draws the charts of the benchmarks, as SVG files in a folder.
//
//	charts -out FOLDER            draws the charts that standard input describes, one a line of JSON
//	charts -out FOLDER -go FILE   passes the output of `go test -bench` on, and draws it as FILE.svg
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"kvepp/internal/chart"
)

func main() {
	out := flag.String("out", "", "the folder")
	benchmarks := flag.String("go", "", "the name of the chart of Go benchmarks, without .svg")
	flag.Parse()
	var err error
	switch {
	case *out == "" || flag.NArg() > 0:
		err = errors.New("give -out FOLDER, and no arguments")
	case *benchmarks != "":
		err = drawBenchmarks(os.Stdin, os.Stdout, *out, *benchmarks)
	default:
		err = drawLines(os.Stdin, os.Stdout, *out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "charts:", err)
		os.Exit(1)
	}
}

// described is a chart, as the scripts of the benchmarks describe it.
type described struct {
	File  string `json:"file"` // without .svg
	Title string `json:"title"`
	X     string `json:"x"`
	Mark  string `json:"mark"` // the name of a line at 1
	Log   bool   `json:"log"`
	Bars  []struct {
		Name  string  `json:"name"`
		Value float64 `json:"value"`
	} `json:"bars"`
}

var fileName = regexp.MustCompile(`^[A-Za-z0-9][-_.A-Za-z0-9]*$`)

// drawLines draws each chart, and prints the names of the files.
func drawLines(from io.Reader, to io.Writer, out string) error {
	for d := json.NewDecoder(from); ; {
		var of described
		if err := d.Decode(&of); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if !fileName.MatchString(of.File) || len(of.Bars) == 0 {
			return fmt.Errorf("a chart with the name %q and %d bars", of.File, len(of.Bars))
		}
		bars := chart.Chart{Title: of.Title, XLabel: of.X, Log: of.Log}
		if of.Mark != "" {
			bars.Mark, bars.MarkName, bars.To = 1, of.Mark, 1.2
		}
		for _, b := range of.Bars {
			bars.Bars = append(bars.Bars, chart.Bar{Name: b.Name, Value: b.Value})
		}
		if err := save(&bars, out, of.File, to); err != nil {
			return err
		}
	}
}

// save writes a chart to the folder, and prints the file's name.
func save(bars *chart.Chart, out, name string, to io.Writer) error {
	file := filepath.Join(out, name+".svg")
	if err := bars.Save(file); err != nil {
		return err
	}
	_, err := fmt.Fprintln(to, "chart: "+file)
	return err
}

// benchmark matches a line of `go test -bench`: the name, the number of processors, of runs, and of nanoseconds.
var benchmark = regexp.MustCompile(`^Benchmark(\S+?)(?:-\d+)?\s+\d+\s+([0-9.e+]+) ns/op`)

// drawBenchmarks copies the output of Go benchmarks, and draws the median time of each.
func drawBenchmarks(from io.Reader, to io.Writer, out, name string) error {
	var names []string
	times := map[string][]float64{}
	pkg, failed := "", false
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		if _, err := fmt.Fprintln(to, lines.Text()); err != nil {
			return err
		}
		failed = failed || strings.HasPrefix(lines.Text(), "FAIL")
		if of, ok := strings.CutPrefix(lines.Text(), "pkg: "); ok {
			pkg = of[strings.LastIndexByte(of, '/')+1:] + " "
		}
		m := benchmark.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		ns, err := strconv.ParseFloat(m[2], 64)
		if err != nil || math.IsInf(ns, 0) {
			return fmt.Errorf("%q: %w", lines.Text(), err)
		}
		if of := pkg + m[1]; len(times[of]) == 0 {
			names = append(names, of)
		}
		times[pkg+m[1]] = append(times[pkg+m[1]], ns)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if failed || len(names) == 0 { // the exit status of go test does not come through the pipe
		return errors.New("the benchmarks failed, or there are none in the output")
	}
	bars := chart.Chart{Title: "Go benchmarks: nanoseconds of an operation", XLabel: "ns (logarithmic)", Log: true}
	for _, of := range names {
		all := times[of]
		slices.Sort(all)
		bars.Bars = append(bars.Bars, chart.Bar{Name: of, Value: (all[(len(all)-1)/2] + all[len(all)/2]) / 2})
	}
	return save(&bars, out, name, to)
}
