package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"golang.org/x/term"

	"kvepp/internal/flags"
	"kvepp/serve/admin"
)

const topHelp = `Show the workers of a running kvepp serve and its latest requests in the terminal, every two
seconds. The command asks its --admin-address, also through kubectl port-forward.

Usage:       kvepp top [flags]
Example:     kvepp top --once            print both tables once, as plain text
             kvepp top --once -o json    print the answers of /debug/fleet and /debug/decisions
Keys:        Tab, f, r: fleet, requests   s: sort by the next column   j, k, arrows: scroll   q: end
Exit status: 0 if shown, 1 if kvepp cannot be reached, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

RUN and WAIT are the engine's running and waiting requests, or those that kvepp has booked. PREFILL
counts prompt tokens that wait. HIT is the share of prompt tokens that were cached since the worker
joined, REQ/S the rate of the last seconds. EVENT is the age of the latest KV event.
Without a terminal on standard output, the command prints both tables once.
`

type topConfig struct {
	once     bool
	output   string
	interval time.Duration
}

func (o *topConfig) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.once, "once", false, "print the workers and the latest requests once, as plain text")
	f.StringVarP(&o.output, "output", "o", "text", "the `FORMAT` of --once: text or json")
	f.DurationVar(&o.interval, "interval", 2*time.Second, "how often to ask kvepp, at least 500ms")
}

func (o *topConfig) validate() error {
	if err := flags.OneOf("output", o.output, "text", "json"); err != nil {
		return err
	}
	switch {
	case o.output == "json" && !o.once:
		return errors.New("-o json: give --once too")
	case o.interval < 500*time.Millisecond:
		return fmt.Errorf("--interval %v: must be at least 500ms", o.interval)
	}
	return nil
}

const topRequests = 50 // decisions that top asks for

// glance is what top shows.
type glance struct {
	Fleet     admin.Fleet      `json:"fleet"`
	Decisions []admin.Decision `json:"decisions"` // the newest first

	rates map[string]float64 // requests a second by worker, since the glance before; nil: there is none
}

// glance asks for the workers and the latest requests. before is the glance before; nil: none.
func (s *server) glance(ctx context.Context, before *glance) (*glance, error) {
	now := new(glance)
	path := "/debug/fleet"
	if before == nil {
		path += "?history=1"
	}
	if err := s.get(ctx, path, &now.Fleet); err != nil {
		return nil, err
	}
	var found struct{ Decisions []admin.Decision }
	if err := s.get(ctx, "/debug/decisions?n="+strconv.Itoa(topRequests), &found); err != nil {
		return nil, err
	}
	now.Decisions = found.Decisions
	now.rates = map[string]float64{}
	for i := range now.Fleet.Workers {
		w := &now.Fleet.Workers[i]
		if h := w.History; h != nil && len(h.RequestsPerSecond) > 0 {
			now.rates[keyOf(w)] = h.RequestsPerSecond[len(h.RequestsPerSecond)-1]
		}
	}
	if before != nil {
		now.rates = ratesSince(&before.Fleet, &now.Fleet)
	}
	return now, nil
}

func keyOf(w *admin.FleetWorker) string { return worker(w.Name, w.Rank) }

// ratesSince returns each worker's ended requests a second between two responses.
func ratesSince(before, now *admin.Fleet) map[string]float64 {
	was := map[string]uint64{}
	for i := range before.Workers {
		was[keyOf(&before.Workers[i])] = before.Workers[i].Requests
	}
	seconds := max(now.Time.Sub(before.Time).Seconds(), 1e-3)
	rates := map[string]float64{}
	for i := range now.Workers {
		w := &now.Workers[i]
		if n, known := was[keyOf(w)]; known && w.Requests >= n {
			rates[keyOf(w)] = float64(w.Requests-n) / seconds
		}
	}
	return rates
}

// topColumn is a column of the table of workers. key sorts; nil: by the text.
type topColumn struct {
	title string
	cell  func(g *glance, w *admin.FleetWorker) string
	key   func(g *glance, w *admin.FleetWorker) float64 // the largest first
}

var topColumns = []topColumn{
	{"WORKER", func(_ *glance, w *admin.FleetWorker) string { return printable(keyOf(w)) }, nil},
	{"RUN", func(_ *glance, w *admin.FleetWorker) string { return strconv.Itoa(int(runningOn(w))) },
		func(_ *glance, w *admin.FleetWorker) float64 { return runningOn(w) }},
	{"WAIT", func(_ *glance, w *admin.FleetWorker) string {
		if w.Waiting == nil {
			return "-"
		}
		return strconv.Itoa(int(*w.Waiting))
	}, func(_ *glance, w *admin.FleetWorker) float64 { return *cmp.Or(w.Waiting, new(float64)) }},
	{"PREFILL", func(_ *glance, w *admin.FleetWorker) string { return strconv.Itoa(w.PrefillTokens) },
		func(_ *glance, w *admin.FleetWorker) float64 { return float64(w.PrefillTokens) }},
	{"HELD", func(_ *glance, w *admin.FleetWorker) string { return strconv.Itoa(w.ActiveBlocks) },
		func(_ *glance, w *admin.FleetWorker) float64 { return float64(w.ActiveBlocks) }},
	{"BLOCKS", func(_ *glance, w *admin.FleetWorker) string {
		if w.CapacityBlocks == 0 {
			return strconv.Itoa(w.Blocks)
		}
		return fmt.Sprintf("%d/%d", w.Blocks, w.CapacityBlocks)
	}, func(_ *glance, w *admin.FleetWorker) float64 { return float64(w.Blocks) }},
	{"HIT", func(_ *glance, w *admin.FleetWorker) string {
		if w.PromptTokens == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f%%", 100*hitShare(w))
	}, func(_ *glance, w *admin.FleetWorker) float64 { return hitShare(w) }},
	{"REQ/S", func(g *glance, w *admin.FleetWorker) string {
		if rate, known := g.rates[keyOf(w)]; known {
			return strconv.FormatFloat(rate, 'f', 1, 64)
		}
		return "-"
	}, func(g *glance, w *admin.FleetWorker) float64 { return g.rates[keyOf(w)] }},
	{"EVENT", func(_ *glance, w *admin.FleetWorker) string {
		if w.LastEvent == nil {
			return "-"
		}
		return strconv.FormatFloat(*w.LastEvent, 'f', 0, 64) + "s"
	}, func(_ *glance, w *admin.FleetWorker) float64 { return *cmp.Or(w.LastEvent, new(float64)) }},
	{"STATE", func(_ *glance, w *admin.FleetWorker) string { return printable(statesOf(w)) }, nil},
}

func runningOn(w *admin.FleetWorker) float64 {
	if w.Running != nil {
		return *w.Running
	}
	return float64(w.BookedRequests)
}

func hitShare(w *admin.FleetWorker) float64 {
	return float64(w.CachedTokens) / float64(max(w.PromptTokens, 1))
}

func statesOf(w *admin.FleetWorker) string {
	names := make([]string, len(w.States))
	for i, s := range w.States {
		names[i] = s.State
	}
	return strings.Join(names, ", ")
}

// summary returns the lines above both tables.
func (g *glance) summary() (lines []string) {
	running, prompt, cached, rate := 0.0, uint64(0), uint64(0), 0.0
	for i := range g.Fleet.Workers {
		w := &g.Fleet.Workers[i]
		running += runningOn(w)
		prompt, cached = prompt+w.PromptTokens, cached+w.CachedTokens
		rate += g.rates[keyOf(w)]
	}
	queued := 0
	for _, q := range g.Fleet.Queues {
		queued += q.Requests
	}
	lines = append(lines, fmt.Sprintf("kvepp %s, up %v: %d workers, %.0f running, %d queued, %.1f requests/s, "+
		"%.1f%% of prompt tokens cached", g.Fleet.Version, g.Fleet.Time.Sub(g.Fleet.Started).Round(time.Second),
		len(g.Fleet.Workers), running, queued, rate, 100*float64(cached)/float64(max(prompt, 1))))
	for _, f := range g.Fleet.Findings {
		lines = append(lines, "=> "+printable(f))
	}
	return lines
}

// workers returns the table of workers, sorted by a column.
func (g *glance) workers(column int) []string {
	rows := make([]*admin.FleetWorker, len(g.Fleet.Workers))
	for i := range rows {
		rows[i] = &g.Fleet.Workers[i]
	}
	by := &topColumns[column]
	slices.SortStableFunc(rows, func(a, b *admin.FleetWorker) int {
		if by.key == nil {
			return cmp.Compare(by.cell(g, a), by.cell(g, b))
		}
		return cmp.Compare(by.key(g, b), by.key(g, a))
	})
	return linesOf(func(t io.Writer) {
		titles := make([]string, len(topColumns))
		for i, c := range topColumns {
			titles[i] = c.title
		}
		titles[column] += "*"
		fmt.Fprintln(t, strings.Join(titles, "\t"))
		cells := titles
		for _, w := range rows {
			for i, c := range topColumns {
				cells[i] = c.cell(g, w)
			}
			fmt.Fprintln(t, strings.Join(cells, "\t"))
		}
	})
}

// requests returns the table of the latest requests.
func (g *glance) requests() []string {
	format := strings.Repeat("%s\t", len(decisionTitles)) + "%s\t%s\n"
	return linesOf(func(t io.Writer) {
		fmt.Fprintf(t, format, append(decisionTitles, "MODEL", "REQUEST")...)
		for i := range g.Decisions {
			d := &g.Decisions[i]
			fmt.Fprintf(t, format, append(cellsOf(d, "15:04:05"), printable(cmp.Or(d.LoRA, d.Model, "-")),
				printable(d.RequestID))...)
		}
	})
}

// linesOf returns the lines of a table.
func linesOf(write func(io.Writer)) []string {
	return strings.Split(strings.TrimSuffix(string(table(write)), "\n"), "\n")
}

// top shows a running kvepp until the operator ends it, or once.
func (s *server) top(ctx context.Context, o *topConfig, stdin io.Reader, stdout io.Writer) error {
	in, keys := stdin.(*os.File)
	out, shows := stdout.(*os.File)
	if o.once || !keys || !shows || !term.IsTerminal(int(in.Fd())) || !term.IsTerminal(int(out.Fd())) {
		return s.topOnce(ctx, o.output, stdout)
	}
	before, err := s.glance(ctx, nil)
	if err != nil {
		return err // before the terminal is changed
	}
	was, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return fmt.Errorf("the terminal cannot be set up: %w", err)
	}
	const begin, end = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l" // the alternate screen, without a cursor
	fmt.Fprint(out, begin)
	defer func() {
		fmt.Fprint(out, end)
		term.Restore(int(in.Fd()), was) // without it the shell could not be used; there is no other remedy for an error
	}()
	pressed := make(chan byte)
	go readKeys(in, pressed) // until the process ends: a read of a terminal cannot be interrupted
	screen := &topScreen{now: before}
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	type response struct {
		now *glance
		err error
	}
	responses, asking := make(chan response, 1), false
	for {
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil || width < 1 || height < 1 { // some serial and pseudo-terminals do not know their size
			width, height = 80, 24
		}
		if _, err := io.WriteString(out, screen.draw(width, height)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case key, open := <-pressed:
			if !open || !screen.press(key) {
				return nil
			}
		case <-tick.C:
			if before := screen.now; !asking { // beside this loop, so that keys work while kvepp does not answer
				asking = true
				go func() {
					now, err := s.glance(ctx, before)
					responses <- response{now, err}
				}()
			}
		case a := <-responses:
			if screen.lost, asking = a.err, false; a.err == nil {
				screen.now = a.now
			}
		}
	}
}

// topOnce writes both tables, or the responses.
func (s *server) topOnce(ctx context.Context, output string, to io.Writer) error {
	now, err := s.glance(ctx, nil)
	if err != nil {
		return err
	}
	if output == "json" {
		return writeJSON(to, now)
	}
	lines := append(now.summary(), "")
	lines = append(append(lines, now.workers(0)...), "")
	_, err = io.WriteString(to, strings.Join(append(lines, now.requests()...), "\n")+"\n")
	return err
}

// Keys that are not a character of their own: what terminals send for arrows is read as one of these.
const (
	keyUp   = 0x80
	keyDown = 0x81
)

// readKeys sends the pressed keys until there are no more.
func readKeys(from io.Reader, pressed chan<- byte) {
	defer close(pressed)
	buffer := make([]byte, 16)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		switch keys := string(buffer[:n]); keys {
		case "\x1b[A", "\x1bOA":
			pressed <- keyUp
		case "\x1b[B", "\x1bOB":
			pressed <- keyDown
		default:
			for i := range n {
				pressed <- buffer[i]
			}
		}
	}
}

// topScreen is what the screen shows.
type topScreen struct {
	now      *glance
	lost     error // of the latest question to kvepp
	requests bool  // shown, instead of workers
	column   int   // by which workers are sorted
	from     int   // first shown row
}

// press handles a key. It returns false if the operator wants to end.
func (s *topScreen) press(key byte) bool {
	const ctrlC = 3
	switch key {
	case 'q', ctrlC:
		return false
	case '\t':
		s.requests, s.from = !s.requests, 0
	case 'f':
		s.requests, s.from = false, 0
	case 'r':
		s.requests, s.from = true, 0
	case 's':
		s.column = (s.column + 1) % len(topColumns)
	case 'j', keyDown:
		s.from++
	case 'k', keyUp:
		s.from = max(s.from-1, 0)
	}
	return true
}

// draw returns what makes the terminal show the screen.
func (s *topScreen) draw(width, height int) string {
	const home, restOfLine, rest, bold, plain = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[1m", "\x1b[0m"
	head, table := s.now.summary(), s.now.workers(s.column)
	if s.requests {
		table = s.now.requests()
	}
	if s.lost != nil {
		head = append(head, "kvepp does not answer: "+printable(s.lost.Error()))
	}
	foot := "Tab: fleet, requests   s: sort   j, k: scroll   q: end"
	rows := max(height-len(head)-3, 1) // of the table, below its titles
	s.from = max(min(s.from, len(table)-1-rows), 0)
	lines := append(head, "", table[0])
	lines = append(lines, table[1+s.from:min(1+s.from+rows, len(table))]...)
	lines = lines[:min(len(lines), max(height-1, 1))]
	var out strings.Builder
	out.WriteString(home)
	for i, line := range lines {
		if text := clipped(line, width); i == len(head)+1 {
			out.WriteString(bold + text + plain)
		} else {
			out.WriteString(text)
		}
		out.WriteString(restOfLine + "\r\n")
	}
	out.WriteString(clipped(foot, width) + restOfLine + rest)
	return out.String()
}

// clipped returns the first characters of a line.
func clipped(line string, width int) string {
	if utf8.RuneCountInString(line) <= width {
		return line
	}
	return string([]rune(line)[:max(width, 0)])
}
