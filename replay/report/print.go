package report

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"kvepp/internal/chart"
	"kvepp/replay"
)

// print prints the table.
func (c *Config) print(to io.Writer, settings []Setting, reports []*replay.Report) error {
	first, bound := reports[0], ""
	if first.DistinctFull {
		bound = "at least "
	}
	fmt.Fprintf(to, "%d requests of %d tokens on average in %v; one cache of infinite size would have %s%.1f %% of "+
		"the prompts.\n",
		first.Requests, first.ArrivedTokens/max(first.Requests, 1), first.Duration.Round(time.Second), bound,
		100*first.PossibleShare())
	if first.TooLarge > 0 {
		fmt.Fprintf(to, "%d more requests need more than the KV blocks of any engine and are left out.\n",
			first.TooLarge)
	}
	fmt.Fprintf(to, "Goodput: first token within %v, mean gap between tokens within %v.\n\n", c.ttft, c.tpot)
	table := func(head, units string, row func(*replay.Report) string) error {
		w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintf(w, "\t%s\t\nsetting\t%s\t\n", head, units)
		for i, r := range reports {
			fmt.Fprintf(w, "%s\t%s\t\n", settings[i].Name, row(r))
		}
		return w.Flush()
	}
	err := table("cached\tTTFT ms\t\t\t\t\tgoodput\tbusiest\tqueued ms\t\trefused",
		"%\tmean\tp50\tp90\tp99\tmax\t%\tby mean\tp90\tp99\t%", func(r *replay.Report) string {
			return fmt.Sprintf("%.1f\t%s\t%.1f\t%.2f\t%.0f\t%.0f\t%.1f", 100*r.CachedShare(), times(&r.TTFT, 1e3, 0),
				100*r.Goodput(c.ttft, c.tpot), r.Imbalance(), 1e3*r.Queued.P90, 1e3*r.Queued.P99,
				100*float64(r.Refused())/float64(max(r.Requests, 1)))
		})
	if err != nil {
		return err
	}
	fmt.Fprintln(to)
	err = table("ITL ms\t\t\t\t\tend to end s\t\t\t\t", "mean\tp50\tp90\tp99\tmax\tmean\tp50\tp90\tp99\tmax",
		func(r *replay.Report) string { return times(&r.TPOT, 1e3, 1) + "\t" + times(&r.E2E, 1, 2) })
	if err != nil {
		return err
	}
	for i, r := range reports {
		if s := &r.Sessions; s.New > 0 {
			fmt.Fprintf(to, "%s: %d sessions; %d later requests stayed on their session's worker, %d moved it.\n",
				settings[i].Name, s.New, s.Kept, s.Moved)
		}
	}
	return nil
}

// times formats mean, median, 90th and 99th percentile, and the greatest value.
func times(d *replay.Distribution, scale float64, digits int) string {
	return fmt.Sprintf("%.*f\t%.*f\t%.*f\t%.*f\t%.*f", digits, scale*d.Mean, digits, scale*d.P50, digits,
		scale*d.P90, digits, scale*d.P99, digits, scale*d.Max)
}

// decisions is the file of --out.
type decisions struct {
	path  string
	names []replay.Own // of workers; nil: they are numbers
	file  *os.File
	to    *bufio.Writer
	lines *json.Encoder
	err   error // the first one
}

func createDecisions(path string, names []replay.Own) (*decisions, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	d := &decisions{path: path, names: names, file: f, to: bufio.NewWriterSize(f, 1<<16)}
	d.lines = json.NewEncoder(d.to)
	return d, nil
}

// decisionLine is a line of --out. Times are in milliseconds. What a refused request does not have is left out.
type decisionLine struct {
	Setting   string            `json:"setting"`
	Number    int               `json:"number"`
	ID        string            `json:"request_id,omitempty"`
	Session   string            `json:"session_id,omitempty"`
	Outcome   replay.Outcome    `json:"outcome"`
	Arrived   float64           `json:"arrived_ms"`
	Queued    float64           `json:"queued_ms"`
	Prompt    int               `json:"prompt_tokens"`
	Output    int               `json:"output_tokens"`
	Served    *servedLine       `json:"served,omitempty"`
	Candidate []candidateOfLine `json:"candidates,omitempty"`
}

type servedLine struct {
	Worker    string  `json:"worker"`
	Predicted int     `json:"predicted_tokens"`
	Cached    int     `json:"cached_tokens"`
	TTFT      float64 `json:"ttft_ms"`
	ITL       float64 `json:"itl_ms"`
	E2E       float64 `json:"e2e_ms"`
}

// candidateOfLine has the terms of a candidate's cost by the names of /debug/decisions.
type candidateOfLine struct {
	Worker         string  `json:"worker"`
	Chosen         bool    `json:"chosen,omitempty"`
	Cost           float64 `json:"cost"`
	CachedBlocks   int     `json:"cached_blocks"`
	PrefillTokens  int     `json:"prefill_tokens"`
	DecodeBlocks   float64 `json:"decode_blocks"`
	ActiveRequests int     `json:"active_requests"`
}

func (d *decisions) write(setting string, x *replay.Decision) {
	if d.err != nil {
		return
	}
	ms := func(t time.Duration) float64 { return float64(t.Microseconds()) / 1e3 }
	line := decisionLine{
		Setting: setting,
		Number:  x.Number,
		ID:      x.Request.ID,
		Session: x.Request.Session,
		Outcome: x.Outcome,
		Arrived: ms(x.Arrived),
		Queued:  ms(x.Queued),
		Prompt:  x.Request.Prompt,
		Output:  x.Request.Output,
	}
	if x.Outcome == replay.Completed {
		line.Served = &servedLine{d.worker(x.Worker), x.Predicted, x.Cached, ms(x.TTFT), ms(x.ITL), ms(x.E2E)}
	}
	for _, c := range x.Candidates {
		line.Candidate = append(line.Candidate, candidateOfLine{d.worker(c.Worker), c.Chosen, c.Cost,
			c.Terms.DeviceBlocks, c.Terms.PrefillTokens, c.Terms.DecodeBlocks, c.Terms.ActiveRequests})
	}
	d.err = d.lines.Encode(&line)
}

func (d *decisions) worker(w int) string {
	if w < len(d.names) {
		return d.names[w].Name
	}
	return fmt.Sprint(w)
}

func (d *decisions) close() error {
	err := d.err
	if err == nil {
		err = d.to.Flush()
	}
	if closed := d.file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("--out %s: %w", d.path, err)
	}
	return nil
}

// draw writes the charts.
func draw(dir string, settings []Setting, reports []*replay.Report) error {
	cached := chart.Chart{Title: cachedTitle, To: 100,
		XLabel: fmt.Sprintf("%%; one cache of infinite size: %.1f", 100*reports[0].PossibleShare())}
	balance := chart.Chart{Title: "How much busier the busiest engine is than the mean", XLabel: "minutes",
		YLabel: "% of the time; 0: even", To: 20}
	type figure struct {
		file, title string
		scale       float64
		unit        string
		of          func(*replay.Report) *replay.Distribution
	}
	figures := []figure{
		{"ttft.svg", "Time to first token", 1e3, "ms", func(r *replay.Report) *replay.Distribution { return &r.TTFT }},
		{"itl.svg", "Mean gap between the tokens of a response", 1e3, "ms",
			func(r *replay.Report) *replay.Distribution { return &r.TPOT }},
		{"e2e.svg", "Time from arrival to the last token", 1, "seconds",
			func(r *replay.Report) *replay.Distribution { return &r.E2E }},
	}
	for i, r := range reports {
		name := settings[i].Name
		cached.Bars = append(cached.Bars, chart.Bar{Name: name, Value: 100 * r.CachedShare()})
		period, each := r.AheadOverTime()
		line := chart.Line{Name: name}
		for k, share := range each {
			line.X = append(line.X, (time.Duration(2*k+1) * period / 2).Minutes())
			line.Y = append(line.Y, 100*share)
		}
		balance.Lines = append(balance.Lines, line)
	}
	err := cmp.Or(cached.Save(filepath.Join(dir, "cached.svg")),
		balance.Save(filepath.Join(dir, "balance.svg")))
	for _, f := range figures {
		c := chartOfTimes(f.title, f.unit)
		for i, r := range reports {
			c.Lines = append(c.Lines, curveOf(settings[i].Name, f.of(r), f.scale))
		}
		err = cmp.Or(err, c.Save(filepath.Join(dir, f.file)))
	}
	if err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	return nil
}

const cachedTitle = "Share of prompt tokens found in a cache"

// chartOfTimes returns a chart for lines of curveOf.
func chartOfTimes(title, unit string) chart.Chart {
	return chart.Chart{Title: title, XLabel: unit + " (logarithmic)", YLabel: "% of requests within this time",
		Log: true, To: 100}
}

// curveOf is the share of times that are at most X.
func curveOf(name string, of *replay.Distribution, scale float64) chart.Line {
	line := chart.Line{Name: name}
	for k, v := range of.Curve {
		line.X = append(line.X, scale*v)
		line.Y = append(line.Y, 100*float64(k)/float64(len(of.Curve)-1))
	}
	return line
}
