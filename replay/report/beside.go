package report

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"kvepp/internal/chart"
	"kvepp/replay"
)

// Measured is the name of what the recording says, beside the names of settings.
const Measured = "measured"

// side is what became of a group's requests: as the recording measured, or in the replay with a setting. All sides
// count the same requests: the cached tokens of those whose engine reported them, and the times of those whose time was
// measured.
type side struct {
	Name     string `json:"name"`
	Requests int    `json:"requests"`
	Refused  int    `json:"refused"`
	// of prompt tokens: those that were cached, and those that one cache of infinite size would have had
	Prompt   int                 `json:"prompt_tokens"`
	Cached   int                 `json:"cached_tokens"`
	Possible int                 `json:"possible_cached_tokens"`
	Share    float64             `json:"cached_percent"`
	Computed int                 `json:"computed_prompt_tokens"`
	Hottest  float64             `json:"hottest_worker_percent_of_requests"`
	TTFT     replay.Distribution `json:"ttft_ms"`

	times   []float32 // milliseconds
	workers map[int]int
}

// group is all requests, those of an hour, or those of a kind.
type group struct {
	Name  string  `json:"name"` // of an hour: when it begins
	Sides []*side `json:"sides"`

	from time.Time // of the first hour; zero for kinds
}

// beside compares the recording with the replays. It is what --report=json prints.
type beside struct {
	*replay.Recording
	All   *group   `json:"all"`
	Hours []*group `json:"hours"`
	Kinds []*group `json:"kinds"` // by how much time kvepp's replay saves, the most first

	names []string // of sides
}

func newBeside(settings []Setting, r *replay.Recording) *beside {
	b := &beside{Recording: r, names: []string{Measured}}
	for _, s := range settings {
		b.names = append(b.names, s.Name)
	}
	b.All = b.group(new([]*group), "all")
	return b
}

// group returns the group of a list that has this name, and adds it if it is not there.
func (b *beside) group(list *[]*group, name string) *group {
	if i := slices.IndexFunc(*list, func(g *group) bool { return g.Name == name }); i >= 0 {
		return (*list)[i]
	}
	g := &group{Name: name}
	for _, name := range b.names {
		g.Sides = append(g.Sides, &side{Name: name, workers: map[int]int{}})
	}
	*list = append(*list, g)
	return g
}

// add adds a request of the replay with a setting. The first one is Recorded, which also tells what was measured.
func (b *beside) add(setting int, d *replay.Decision) {
	v := d.Request.Served
	first, _ := v.Times(d.Request.Output)
	hour := time.UnixMilli(d.Request.At.Milliseconds()).UTC().Truncate(time.Hour)
	in := b.group(&b.Hours, hour.Format("2006-01-02 15:04"))
	in.from = hour
	kinds := kindsOf(d, first > 0)
	add := func(n int, x *replay.Decision) {
		reported, took := v.Cached >= 0 || b.Reported == 0, x.TTFT
		for _, g := range []*group{b.All, in} {
			g.Sides[n].add(x, reported, first > 0, took)
		}
		if first == 0 {
			took = x.E2E
		}
		for name, is := range kinds {
			if is {
				b.group(&b.Kinds, name).Sides[n].add(x, reported, v.Took > 0, took)
			}
		}
	}
	add(setting+1, d)
	if setting == 0 {
		as := *d
		as.Outcome, as.Cached, as.TTFT, as.E2E = replay.Completed, max(v.Cached, 0), v.TTFT, v.Took
		add(0, &as)
	}
}

func (s *side) add(d *replay.Decision, reported, timed bool, took time.Duration) {
	s.Requests++
	if d.Outcome != replay.Completed {
		s.Refused++
		return
	}
	s.workers[d.Worker]++
	if reported {
		s.Prompt, s.Cached, s.Possible = s.Prompt+d.Request.Prompt, s.Cached+d.Cached, s.Possible+d.Possible
	}
	if timed {
		s.times = append(s.times, float32(1e3*took.Seconds()))
	}
}

// kindsOf returns for each kind whether a request is of it.
func kindsOf(d *replay.Decision, streamed bool) map[string]bool {
	prompt, repeated := d.Request.Prompt, percent(d.Possible, d.Request.Prompt)
	return map[string]bool{
		"streamed":                             streamed,
		"in one piece":                         !streamed,
		"prompt below 1k tokens":               prompt < 1000,
		"prompt of 1k to 4k tokens":            prompt >= 1000 && prompt < 4000,
		"prompt of 4k to 16k tokens":           prompt >= 4000 && prompt < 16000,
		"prompt of 16k tokens or more":         prompt >= 16000,
		"less than a quarter repeated":         repeated < 25,
		"a quarter to three quarters repeated": repeated >= 25 && repeated < 75,
		"three quarters repeated, or more":     repeated >= 75,
	}
}

// finish computes what is shown. The second setting is kvepp: by its gains the kinds are in order.
func (b *beside) finish() {
	slices.SortFunc(b.Hours, func(x, y *group) int { return x.from.Compare(y.from) })
	if len(b.Hours) > 0 {
		b.All.from = b.Hours[0].from
	}
	for _, g := range slices.Concat([]*group{b.All}, b.Hours, b.Kinds) {
		for _, s := range g.Sides {
			s.TTFT, s.Computed, s.Share = replay.Describe(s.times), s.Prompt-s.Cached, percent(s.Cached, s.Prompt)
			s.Hottest = percent(slices.Max(append(slices.Collect(maps.Values(s.workers)), 0)), s.Requests-s.Refused)
		}
	}
	gain := func(g *group) float64 {
		return float64(g.Sides[1].Requests) * (g.Sides[1].TTFT.Mean - g.Sides[2].TTFT.Mean)
	}
	slices.SortFunc(b.Kinds, func(x, y *group) int {
		return cmp.Or(cmp.Compare(gain(y), gain(x)), strings.Compare(x.Name, y.Name))
	})
}

func percent(part, whole int) float64 { return 100 * float64(part) / float64(max(whole, 1)) }

// text prints the comparison.
func (b *beside) text(to io.Writer) {
	fmt.Fprintf(to, "%d requests on %d workers from %s; %d with reported cached tokens, %d with a "+
		"measured time to first token.\n%s", b.All.Sides[0].Requests, len(b.Workers),
		b.All.from.Format(time.DateTime+" UTC"), b.Reported, len(b.All.Sides[0].times), b.Engines)
	fmt.Fprintf(to, "Not judged by kvepp when they were recorded: %s.\n"+
		"Sent to a worker that kvepp would have avoided: %s.\n", counts(b.Unjudged), counts(b.Avoided))
	if left := b.Unjudged["not_sampled"]; left > 0 {
		fmt.Fprintf(to, "kvepp did not read %d of the requests (--shadow-share). The replays have the others: their "+
			"loads and times are those of less traffic. Record without --shadow-share for a forecast.\n", left)
	}
	was, again := b.All.Sides[0], b.All.Sides[1]
	fmt.Fprintf(to, "How far to trust the replay: recorded has %+.1f points of cached tokens and %+.0f %% of "+
		"the mean time to first token\nbeside what was measured. Read the other lines with that error.\n\n",
		again.Share-was.Share, 100*(again.TTFT.Mean-was.TTFT.Mean)/max(was.TTFT.Mean, 1e-9))
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "\tcached\tof possible\tcomputed\tTTFT ms\t\t\t\t\thottest\trefused\t\n"+
		"\t%\t%\ttokens\tmean\tp50\tp90\tp99\tmax\tworker %\t\t\n")
	shown := []*group{b.All}
	if len(b.Hours) > 1 {
		shown = append(shown, b.Hours...)
	}
	for _, g := range shown {
		fmt.Fprintf(w, "%s\t\t\t\t\t\t\t\t\t\t\t\n", g.Name)
		for _, s := range g.Sides {
			fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%d\t%s\t%.0f\t%d\t\n", s.Name, s.Share, percent(s.Cached, s.Possible),
				s.Computed, times(&s.TTFT, 1, 0), s.Hottest, s.Refused)
		}
	}
	w.Flush()
	fmt.Fprintf(to, "\nMean time to first token in ms, the greatest gain first. In one piece: of the whole.\n\n")
	fmt.Fprintf(w, "\trequests\t%s\t\n", strings.Join(b.names, "\t"))
	for _, k := range b.Kinds {
		fmt.Fprintf(w, "%s\t%d\t", k.Name, k.Sides[0].Requests)
		for _, s := range k.Sides {
			fmt.Fprintf(w, "%.0f\t", s.TTFT.Mean)
		}
		fmt.Fprintln(w)
	}
	w.Flush()
}

func counts(of map[string]int) string {
	list := []string{}
	for _, name := range slices.Sorted(maps.Keys(of)) {
		list = append(list, fmt.Sprintf("%s %d", name, of[name]))
	}
	return cmp.Or(strings.Join(list, ", "), "0")
}

//go:embed beside.html
var page string

// page returns the comparison as one HTML page with charts.
func (b *beside) page() string {
	cached := chart.Chart{Title: cachedTitle, XLabel: "%", To: 100}
	within := chartOfTimes("Time to first token", "ms")
	cachedByHour := chart.Chart{Title: cachedTitle + ", by hour", XLabel: "hours", YLabel: "%", To: 100}
	timesByHour := chart.Chart{Title: "Mean time to first token, by hour", XLabel: "hours", YLabel: "ms"}
	for n, s := range b.All.Sides {
		cached.Bars = append(cached.Bars, chart.Bar{Name: s.Name, Value: s.Share})
		within.Lines = append(within.Lines, curveOf(s.Name, &s.TTFT, 1))
		shares, means := chart.Line{Name: s.Name}, chart.Line{Name: s.Name}
		for _, hour := range b.Hours {
			x := hour.from.Sub(b.All.from).Hours()
			shares.X, shares.Y = append(shares.X, x), append(shares.Y, hour.Sides[n].Share)
			means.X, means.Y = append(means.X, x), append(means.Y, hour.Sides[n].TTFT.Mean)
		}
		cachedByHour.Lines, timesByHour.Lines = append(cachedByHour.Lines, shares), append(timesByHour.Lines, means)
	}
	charts := cached.String() + within.String()
	if len(b.Hours) > 1 {
		charts += cachedByHour.String() + timesByHour.String()
	}
	var text strings.Builder
	b.text(&text)
	return fmt.Sprintf(page, charts, html.EscapeString(text.String()))
}

// write writes the comparison as --report says: text, JSON, or text and a page in a file.
func (b *beside) write(how string, to io.Writer) error {
	if how == "json" {
		e := json.NewEncoder(to)
		e.SetIndent("", "  ")
		return e.Encode(b)
	}
	if how != "text" {
		if err := os.WriteFile(how, []byte(b.page()), 0o644); err != nil {
			return fmt.Errorf("--report: %w", err)
		}
	}
	b.text(to)
	return nil
}
