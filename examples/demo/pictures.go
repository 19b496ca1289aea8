package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/test/harness/browser"
	"kvepp/test/harness/stack"
)

// The traffic of the pictures.
const (
	visitors   = 72                // conversations
	arrivals   = 120 * time.Second // they begin within this time
	mostTurns  = 7
	mostOutput = 200 // tokens
	// smallCache is the number of KV blocks of each worker: too few to keep all conversations.
	smallCache = 2000
	maxPicture = 100 << 10 // bytes
)

// takePictures holds conversations through Envoy and kvepp, and writes pictures of the page into a folder.
func takePictures(ctx context.Context, s *stack.Stack, folder string) (err error) {
	path := browser.Find()
	if path == "" {
		return errors.New("no Chromium: test/tools/install.sh chromium installs it")
	}
	b, err := browser.Start(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	page, err := b.Open(ctx)
	if err != nil {
		return err
	}
	p := &pictures{page, ctx, folder}
	fmt.Printf("%d conversations, which begin within %v\n", visitors, arrivals)
	done := make(chan error, 1)
	go func() { done <- visit(ctx, s) }()
	select { // the fleet is shown at work
	case err := <-done:
		return cmp.Or(err, errors.New("the conversations ended too early"))
	case <-time.After(arrivals * 2 / 3):
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := page.Go(ctx, s.Admin()+"/"); err != nil {
		return err
	}
	if err := p.take("fleet", 390, seeRate, "#t-rate"); err != nil {
		return err
	}
	if err := <-done; err != nil {
		return err
	}
	if err := p.take("requests", 870, openRequest, ".detail"); err != nil {
		return err
	}
	if err := p.take("prefixes", 860, openPrefix, "#prefix .detail"); err != nil {
		return err
	}
	if err := p.take("ladder", 600, "", "[data-rung='delivered']"); err != nil {
		return err
	}
	if errs := page.Errors(); len(errs) > 0 {
		return fmt.Errorf("the browser's console has errors: %q", errs)
	}
	return nil
}

// until waits in the page for a value.
const until = `const until = async f => {
	for (let v; ; await new Promise(r => setTimeout(r, 100))) if (v = f()) return v;
};`

// seeRate waits for the rate, which needs two responses of the API.
const seeRate = `until(() => /\d/.test(document.querySelector("#t-rate")?.textContent))`

// openRequest opens the request whose candidates had the most running requests, of those whose cached tokens several
// workers held.
const openRequest = `(async () => {
	const {decisions} = await (await fetch("/debug/decisions?n=50")).json();
	const sum = (d, of) => d.candidates.reduce((n, c) => n + of(c), 0);
	const load = d => (sum(d, c => c.device_blocks > 0 ? 1 : 0) > 1) * sum(d, c => c.active_requests);
	const fit = decisions.filter(d => d.outcome && d.outcome.complete && d.predicted_cached_tokens > 1000);
	fit.sort((a, b) => load(b) - load(a));
	const row = await until(() => document.querySelector("tr[data-request='" + fit[0].request_id + "']"));
	row.querySelector("button").click();
	row.scrollIntoView();
})()`

// openPrefix opens the system prompt that the most requests begin with.
const openPrefix = `(async () => (await until(() => document.querySelector(".flame-bar"))).dispatchEvent(
	new MouseEvent("click", {bubbles: true})))()`

// visit holds the conversations. Their number, texts and pauses are the same each time.
func visit(ctx context.Context, s *stack.Stack) error {
	var (
		wait   sync.WaitGroup
		failed atomic.Pointer[error]
	)
	for c := range visitors {
		wait.Go(func() {
			if err := hold(ctx, s, c); err != nil {
				failed.Store(&err)
			}
		})
	}
	wait.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

func hold(ctx context.Context, s *stack.Stack, c int) error {
	rng := rand.New(rand.NewPCG(1, uint64(c)))
	pause := func(d time.Duration) { // up to its double
		select {
		case <-time.After(d + time.Duration(rng.Int64N(int64(d)))):
		case <-ctx.Done():
		}
	}
	pause(max(time.Duration(c)*arrivals/visitors, time.Second) / 2)
	header := http.Header{"X-Dynamo-Session-Id": {fmt.Sprintf("conversation-%d", c)}}
	messages := []stack.Message{{Role: "system", Content: systems[c%3/2]}}
	for t := range 2 + rng.IntN(mostTurns-1) {
		messages = append(messages, stack.Message{Role: "user", Content: question("visit", c, t)})
		extra := map[string]any{"max_tokens": mostOutput/2 + rng.IntN(mostOutput/2)}
		a, err := stack.Chat(ctx, http.DefaultClient, s.Envoy.URL, header, messages, true, extra)
		if err != nil {
			return err
		}
		if a.Status != http.StatusOK {
			return fmt.Errorf("conversation %d, turn %d: status %d: %s", c+1, t+1, a.Status, a.Body)
		}
		messages = append(messages, stack.Message{Role: "assistant", Content: a.Text})
		pause(2 * time.Second)
	}
	return nil
}

type pictures struct {
	page   *browser.Page
	ctx    context.Context
	folder string
}

// take shows a view, runs a script there, waits until the elements show something, and writes the picture.
func (p *pictures) take(view string, height int, script string, shown ...string) error {
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	run := func(script string) error { return p.page.Run(ctx, script, nil) }
	err := errors.Join(p.page.Resize(ctx, 1280, height, false), run(fmt.Sprintf("location.hash = '#/%s'", view)),
		p.page.Await(ctx, "main[data-view="+view+"] h2", ""))
	if err != nil {
		return err
	}
	if script != "" {
		if err := run("(() => {" + until + "return " + script + "})()"); err != nil {
			return err
		}
	}
	for _, selector := range shown {
		if err := p.page.Await(ctx, selector, ""); err != nil {
			return err
		}
	}
	raw, err := p.page.Picture(ctx)
	if err != nil {
		return err
	}
	small, err := fewerColors(raw)
	if err != nil {
		return err
	}
	if len(small) > maxPicture {
		return fmt.Errorf("the picture of %s has %d bytes, at most %d are wanted", view, len(small), maxPicture)
	}
	file := filepath.Join(p.folder, "page-"+view+".png")
	fmt.Printf("%s: %d bytes\n", file, len(small))
	return os.WriteFile(file, small, 0o644)
}

// fewerColors returns a PNG with its 256 most frequent colors. A page has few; the edges of its letters have many.
func fewerColors(raw []byte) ([]byte, error) {
	from, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	counts := map[color.RGBA]int{}
	area := from.Bounds()
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(from.At(x, y)).(color.RGBA) }
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	all := make([]color.RGBA, 0, len(counts))
	for c := range counts {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b color.RGBA) int {
		return cmp.Or(counts[b]-counts[a], bytes.Compare([]byte{a.R, a.G, a.B}, []byte{b.R, b.G, b.B}))
	})
	var kept color.Palette
	for _, c := range all[:min(len(all), 256)] {
		kept = append(kept, c)
	}
	index := make(map[color.RGBA]uint8, len(all))
	for _, c := range all {
		index[c] = uint8(kept.Index(c))
	}
	to := image.NewPaletted(area, kept)
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			to.SetColorIndex(x, y, index[at(x, y)])
		}
	}
	var out bytes.Buffer
	err = (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, to)
	return out.Bytes(), err
}
