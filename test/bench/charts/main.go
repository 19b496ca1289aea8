// Command charts draws the charts of the benchmarks, as SVG files in a folder.
//
//	charts -out FOLDER   draws the charts that standard input describes, one a line of JSON
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"

	"kvepp/internal/chart"
)

func main() {
	out := flag.String("out", "", "the folder")
	flag.Parse()
	err := errors.New("give -out FOLDER, and no arguments")
	if *out != "" && flag.NArg() == 0 {
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
		bars := chart.Chart{Title: of.Title, XLabel: of.X}
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
