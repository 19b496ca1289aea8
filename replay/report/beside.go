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

// side is what became of requests: as the recording measured, or in the replay with a setting. All sides count the same
// requests: the cached tokens of those whose engine reported them, and the times of those with a measured one.
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

// period is what became of the requests of an hour, or of all.
type period struct {
	From  time.Time `json:"from"`
	Sides []*side   `json:"sides"`
}

// kind is a kind of requests, with their mean times to first token.
type kind struct {
	Name     string             `json:"name"`
	Requests int                `json:"requests"`
	TTFT     map[string]float64 `json:"mean_ttft_ms"` // of those with a measured time that completed on each side

	completed map[string]int
}

// beside compares the recording with the replays. It is what --report=json prints.
type beside struct {
	Workers  int            `json:"workers"`
	Engines  string         `json:"engines"` // their speeds
	Unjudged map[string]int `json:"not_judged"`
	Share    float64        `json:"shadow_share"` // of the requests, which kvepp read; 0: all
	LeftOut  int            `json:"left_out"`
	Reported int            `json:"with_reported_cached_tokens"`
	Timed    int            `json:"with_measured_ttft"`
	Avoided  map[string]int `json:"to_a_worker_that_kvepp_avoided"`
	All      *period        `json:"all"`
	Hours    []*period      `json:"hours"`
	Kinds    []*kind        `json:"kinds"` // by how much kvepp's replay gains, the most first

	names []string // of sides
	hours map[time.Duration]*period
	kinds map[string]*kind
}

func newBeside(settings []Setting, r *replay.Recording, shadow *replay.Shadow, engines string) *beside {
	b := &beside{Workers: len(r.Workers), Engines: engines, Unjudged: shadow.Unjudged, Share: shadow.Share,
		LeftOut: r.LeftOut, Reported: r.Cached, Avoided: shadow.Avoided, names: []string{Measured},
		hours: map[time.Duration]*period{}, kinds: map[string]*kind{}}
	for _, s := range settings {
		b.names = append(b.names, s.Name)
	}
	b.All = b.period(0)
	return b
}

func (b *beside) period(from time.Duration) *period {
	p := &period{From: time.UnixMilli(from.Milliseconds()).UTC()}
	for _, name := range b.names {
		p.Sides = append(p.Sides, &side{Name: name, workers: map[int]int{}})
	}
	return p
}

// add adds a request of the replay with a setting. The first one is Recorded, which also tells what was measured.
func (b *beside) add(setting int, d *replay.Decision) {
	v := d.Request.Served
	first, _ := v.Times(d.Request.Output)
	hour := d.Request.At.Truncate(time.Hour)
	if b.hours[hour] == nil {
		b.hours[hour] = b.period(hour)
		b.Hours = append(b.Hours, b.hours[hour])
	}
	kinds := kindsOf(d, first > 0)
	add := func(n int, x *replay.Decision) {
		took := x.TTFT
		if first == 0 {
			took = x.E2E
		}
		for _, p := range []*period{b.All, b.hours[hour]} {
			p.Sides[n].add(x, v.Cached >= 0 || b.Reported == 0, first > 0)
		}
		for _, name := range kinds {
			k := b.kinds[name]
			if k == nil {
				k = &kind{Name: name, TTFT: map[string]float64{}, completed: map[string]int{}}
				b.kinds[name], b.Kinds = k, append(b.Kinds, k)
			}
			k.Requests += 1 - min(n, 1)
			if x.Outcome == replay.Completed && v.Took > 0 {
				k.completed[b.names[n]]++
				k.TTFT[b.names[n]] += took.Seconds() * 1e3
			}
		}
	}
	add(setting+1, d)
	if setting > 0 {
		return
	}
	as := *d
	as.Outcome, as.Cached, as.TTFT, as.E2E = replay.Completed, max(v.Cached, 0), v.TTFT, v.Took
	add(0, &as)
}

func (s *side) add(d *replay.Decision, cached, timed bool) {
	s.Requests++
	if d.Outcome != replay.Completed {
		s.Refused++
		return
	}
	s.workers[d.Worker]++
	if cached {
		s.Prompt, s.Cached, s.Possible = s.Prompt+d.Request.Prompt, s.Cached+d.Cached, s.Possible+d.Possible
	}
	if timed {
		s.times = append(s.times, float32(1e3*d.TTFT.Seconds()))
	}
}

// kindsOf returns the kinds that a request is of.
func kindsOf(d *replay.Decision, streamed bool) []string {
	kind := func(x float64, bounds []float64, names ...string) string {
		i, found := slices.BinarySearch(bounds, x)
		if found {
			i++
		}
		return names[i]
	}
	how := "in one piece"
	if streamed {
		how = "streamed"
	}
	prompt := float64(d.Request.Prompt)
	return []string{how,
		kind(prompt, []float64{1000, 4000, 16000}, "prompt below 1k tokens", "prompt of 1k to 4k tokens",
			"prompt of 4k to 16k tokens", "prompt of 16k tokens or more"),
		kind(float64(d.Possible)/prompt, []float64{0.25, 0.75}, "less than a quarter repeated",
			"a quarter to three quarters repeated", "three quarters repeated, or more")}
}

// finish computes what is shown. The second setting is kvepp: by its gains the kinds are in order.
func (b *beside) finish() {
	slices.SortFunc(b.Hours, func(x, y *period) int { return x.From.Compare(y.From) })
	if len(b.Hours) > 0 {
		b.All.From = b.Hours[0].From
	}
	for _, p := range append(b.Hours[:len(b.Hours):len(b.Hours)], b.All) {
		for _, s := range p.Sides {
			s.TTFT, s.Computed, s.Share = replay.Describe(s.times), s.Prompt-s.Cached, percent(s.Cached, s.Prompt)
			s.Hottest = percent(slices.Max(append(slices.Collect(maps.Values(s.workers)), 0)), s.Requests-s.Refused)
		}
	}
	b.Timed = len(b.All.Sides[0].times)
	for _, k := range b.Kinds {
		for name, n := range k.completed {
			k.TTFT[name] /= float64(n)
		}
	}
	gain := func(k *kind) float64 { return float64(k.Requests) * (k.TTFT[b.names[1]] - k.TTFT[b.names[2]]) }
	slices.SortFunc(b.Kinds, func(x, y *kind) int {
		return cmp.Or(cmp.Compare(gain(y), gain(x)), strings.Compare(x.Name, y.Name))
	})
}

func percent(part, whole int) float64 { return 100 * float64(part) / float64(max(whole, 1)) }

// text prints the comparison.
func (b *beside) text(to io.Writer) {
	fmt.Fprintf(to, "%d requests on %d workers from %s; %d with reported cached tokens, %d with a "+
		"measured time to first token.\n%s", b.All.Sides[0].Requests, b.Workers,
		b.All.From.Format(time.DateTime+" UTC"), b.Reported, b.Timed, b.Engines)
	if len(b.Unjudged) > 0 || b.LeftOut > 0 {
		fmt.Fprintf(to, "Not judged by kvepp when they were recorded: %s. Left out, as no worker is named: %d.\n",
			counts(b.Unjudged), b.LeftOut)
	}
	if len(b.Avoided) > 0 {
		fmt.Fprintf(to, "Sent to a worker that kvepp would have avoided: %s.\n", counts(b.Avoided))
	}
	if b.Share > 0 {
		fmt.Fprintf(to, "kvepp read %.3g %% of the requests (--shadow-share). The replays have no others: their loads "+
			"and times are those of so much traffic. Record without --shadow-share for a forecast.\n", 100*b.Share)
	}
	was, again := b.All.Sides[0], b.All.Sides[1]
	fmt.Fprintf(to, "How far to trust the replay: recorded has %+.1f points of cached tokens and %+.0f %% of "+
		"the mean time to first token\nbeside what was measured. Read the other lines with that error.\n\n",
		again.Share-was.Share, 100*(again.TTFT.Mean-was.TTFT.Mean)/max(was.TTFT.Mean, 1e-9))
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "\tcached\tof possible\tcomputed\tTTFT ms\t\t\t\t\thottest\trefused\t\n"+
		"\t%\t%\ttokens\tmean\tp50\tp90\tp99\tmax\tworker %\t\t\n")
	for i, p := range append([]*period{b.All}, b.Hours...) {
		if len(b.Hours) == 1 && i > 0 {
			break
		}
		if i > 0 {
			fmt.Fprintf(w, "%s\t\t\t\t\t\t\t\t\t\t\t\n", p.From.Format("Jan 2 15:04"))
		}
		for _, s := range p.Sides {
			fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%d\t%s\t%.0f\t%d\t\n", s.Name, s.Share, percent(s.Cached, s.Possible),
				s.Computed, times(&s.TTFT, 1, 0), s.Hottest, s.Refused)
		}
	}
	w.Flush()
	fmt.Fprintf(to, "\nMean time to first token in ms, the greatest gain first. In one piece: of the whole.\n\n")
	fmt.Fprintf(w, "\trequests\t%s\t\n", strings.Join(b.names, "\t"))
	for _, k := range b.Kinds {
		fmt.Fprintf(w, "%s\t%d\t", k.Name, k.Requests)
		for _, name := range b.names {
			fmt.Fprintf(w, "%.0f\t", k.TTFT[name])
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
	cachedByHour := chart.Chart{Title: cachedTitle + ", by hour", XLabel: "hours", YLabel: "%",
		To: 100}
	timesByHour := chart.Chart{Title: "Mean time to first token, by hour", XLabel: "hours", YLabel: "ms"}
	for n, s := range b.All.Sides {
		cached.Bars = append(cached.Bars, chart.Bar{Name: s.Name, Value: s.Share})
		within.Lines = append(within.Lines, curveOf(s.Name, &s.TTFT, 1))
		shares, means := chart.Line{Name: s.Name}, chart.Line{Name: s.Name}
		for _, p := range b.Hours {
			shares.X, shares.Y = append(shares.X, p.From.Sub(b.All.From).Hours()), append(shares.Y, p.Sides[n].Share)
			means.Y = append(means.Y, p.Sides[n].TTFT.Mean)
		}
		means.X = shares.X
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
	switch how {
	case "json":
		e := json.NewEncoder(to)
		e.SetIndent("", "  ")
		return e.Encode(b)
	case "text":
	default:
		if err := os.WriteFile(how, []byte(b.page()), 0o644); err != nil {
			return fmt.Errorf("--report: %w", err)
		}
	}
	b.text(to)
	return nil
}
