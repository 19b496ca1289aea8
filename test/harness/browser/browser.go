// Package browser drives a headless Chromium for tests and pictures, by the DevTools protocol over a pipe: no port, and
// no library.
//
// It owns the browser's process and a folder for its profile. It never uses a profile of the user.
//
// Concurrency: a Browser is safe for concurrent use; the methods of one Page are called by one goroutine.
package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Find returns the path of a Chromium; "" if there is none.
func Find() string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// Browser is a running Chromium.
type Browser struct {
	cmd     *exec.Cmd
	profile string
	to      *os.File

	mu      sync.Mutex // guards all below
	next    int
	waiting map[int]chan response
	pages   map[string]*Page // by session
	failed  error            // why the browser ended; nil: it runs
}

type response struct {
	result json.RawMessage
	err    error
}

type message struct {
	ID        int             `json:"id,omitempty"`
	Method    string          `json:"method,omitempty"`
	SessionID string          `json:"sessionId,omitempty"`
	Params    json.RawMessage `json:"params,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	Error     *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Start starts a browser. Call Close at its end.
func Start(path string) (*Browser, error) {
	profile, err := os.MkdirTemp("", "kvepp-browser-")
	if err != nil {
		return nil, err
	}
	// Chromium reads commands from file descriptor 3 and writes responses to 4, each ended by a zero byte.
	commands, to, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	from, responses, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	b := &Browser{profile: profile, to: to, waiting: map[int]chan response{}, pages: map[string]*Page{}}
	b.cmd = exec.Command(path, "--headless=new", "--remote-debugging-pipe", "--user-data-dir="+profile,
		"--no-first-run",
		"--no-default-browser-check", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
		"--mute-audio",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
		"--no-sandbox", // tests run as root in containers, and open only kvepp's own page
		"--force-color-profile=srgb", "about:blank")
	b.cmd.ExtraFiles = []*os.File{commands, responses}
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Close also ends the browser's own children
	if err := b.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(profile))
	}
	commands.Close()
	responses.Close()
	go b.read(from)
	return b, nil
}

// Close ends the browser and removes its profile.
func (b *Browser) Close() error {
	b.to.Close()
	_ = syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL) // it may have ended
	_ = b.cmd.Wait()
	return os.RemoveAll(b.profile)
}

// read gives each response to its caller and each event to its page, until the browser ends.
func (b *Browser) read(from *os.File) {
	defer from.Close()
	lines := bufio.NewReaderSize(from, 1<<20)
	for {
		text, err := lines.ReadBytes(0)
		if err != nil {
			b.mu.Lock()
			b.failed = fmt.Errorf("the browser has ended: %w", err)
			for id, c := range b.waiting {
				c <- response{err: b.failed}
				delete(b.waiting, id)
			}
			b.mu.Unlock()
			return
		}
		var m message
		if json.Unmarshal(bytes.TrimRight(text, "\x00"), &m) != nil {
			continue
		}
		b.mu.Lock()
		switch c := b.waiting[m.ID]; {
		case m.ID == 0:
			if p := b.pages[m.SessionID]; p != nil {
				p.event(&m)
			}
		case c != nil:
			a := response{result: m.Result}
			if m.Error != nil {
				a.err = errors.New(m.Error.Message)
			}
			c <- a
			delete(b.waiting, m.ID)
		}
		b.mu.Unlock()
	}
}

// call sends a command and decodes its result into v, which may be nil.
func (b *Browser) call(ctx context.Context, session, method string, params, v any) error {
	text, err := json.Marshal(params)
	if err != nil {
		return err
	}
	c := make(chan response, 1)
	b.mu.Lock()
	if b.failed != nil {
		b.mu.Unlock()
		return b.failed
	}
	b.next++
	id := b.next
	b.waiting[id] = c
	command, err := json.Marshal(message{ID: id, Method: method, SessionID: session, Params: text})
	if err == nil {
		_, err = b.to.Write(append(command, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case a := <-c:
		if a.err != nil {
			return fmt.Errorf("%s: %w", method, a.err)
		}
		if v == nil {
			return nil
		}
		return json.Unmarshal(a.result, v)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
}

// Page is a tab.
type Page struct {
	browser *Browser
	session string
	errs    []string // guarded by browser.mu
}

// Open opens a tab with cookies of its own, without a document.
func (b *Browser) Open(ctx context.Context) (*Page, error) {
	var own struct {
		BrowserContextID string `json:"browserContextId"`
	}
	if err := b.call(ctx, "", "Target.createBrowserContext", struct{}{}, &own); err != nil {
		return nil, err
	}
	var target struct {
		TargetID string `json:"targetId"`
	}
	if err := b.call(ctx, "", "Target.createTarget",
		map[string]any{"url": "about:blank", "browserContextId": own.BrowserContextID}, &target); err != nil {
		return nil, err
	}
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	if err := b.call(ctx, "", "Target.attachToTarget",
		map[string]any{"targetId": target.TargetID, "flatten": true}, &attached); err != nil {
		return nil, err
	}
	p := &Page{browser: b, session: attached.SessionID}
	b.mu.Lock()
	b.pages[p.session] = p
	b.mu.Unlock()
	for _, domain := range []string{"Runtime.enable", "Log.enable", "Page.enable"} {
		if err := b.call(ctx, p.session, domain, struct{}{}, nil); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// event notes what the console shows as an error. The caller holds browser.mu.
func (p *Page) event(m *message) {
	switch m.Method {
	case "Runtime.exceptionThrown":
		p.errs = append(p.errs, "exception: "+string(m.Params))
	case "Log.entryAdded":
		var e struct {
			Entry struct{ Level, Text, URL string }
		}
		if json.Unmarshal(m.Params, &e) == nil && e.Entry.Level == "error" {
			p.errs = append(p.errs, e.Entry.Text+" "+e.Entry.URL)
		}
	case "Runtime.consoleAPICalled":
		var e struct{ Type string }
		if json.Unmarshal(m.Params, &e) == nil && (e.Type == "error" || e.Type == "assert") {
			p.errs = append(p.errs, "console: "+string(m.Params))
		}
	}
}

// Errors returns what the console has shown as errors: exceptions, violations of the Content-Security-Policy, files
// that did not load.
func (p *Page) Errors() []string {
	p.browser.mu.Lock()
	defer p.browser.mu.Unlock()
	return append([]string(nil), p.errs...)
}

func (p *Page) call(ctx context.Context, method string, params map[string]any, v any) error {
	return p.browser.call(ctx, p.session, method, params, v)
}

// Go loads a URL.
func (p *Page) Go(ctx context.Context, url string) error {
	var r struct{ ErrorText string }
	if err := p.call(ctx, "Page.navigate", map[string]any{"url": url}, &r); err != nil {
		return err
	}
	if r.ErrorText != "" {
		return fmt.Errorf("%s: %s", url, r.ErrorText)
	}
	return nil
}

// Resize sets the size of the window in CSS pixels, and dark or light.
func (p *Page) Resize(ctx context.Context, width, height int, dark bool) error {
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	return errors.Join(
		p.call(ctx, "Emulation.setDeviceMetricsOverride",
			map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil),
		p.call(ctx, "Emulation.setEmulatedMedia",
			map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": scheme}}}, nil))
}

// Run evaluates JavaScript in the page, awaits it, and decodes its value into v, which may be nil.
func (p *Page) Run(ctx context.Context, script string, v any) error {
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	err := p.call(ctx, "Runtime.evaluate",
		map[string]any{"expression": script, "awaitPromise": true, "returnByValue": true}, &r)
	switch {
	case err != nil:
		return err
	case r.ExceptionDetails != nil:
		return fmt.Errorf("%.80s: %s %s", script, r.ExceptionDetails.Text, r.ExceptionDetails.Exception.Description)
	case v == nil || len(r.Result.Value) == 0:
		return nil
	}
	return json.Unmarshal(r.Result.Value, v)
}

// Text returns the text that an element shows, by CSS selector; "" if there is none.
func (p *Page) Text(ctx context.Context, selector string) (text string, err error) {
	quoted, err := json.Marshal(selector)
	if err != nil {
		return "", err
	}
	err = p.Run(ctx, "document.querySelector("+string(quoted)+")?.innerText ?? ''", &text)
	return text, err
}

// Await waits until an element shows all of these texts.
func (p *Page) Await(ctx context.Context, selector string, texts ...string) error {
	for {
		shown, err := p.Text(ctx, selector)
		missing := ""
		for _, text := range texts {
			if !strings.Contains(shown, text) {
				missing = text
			}
		}
		if err == nil && missing == "" && shown != "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s does not show %q (%w, %w); it shows:\n%s", selector, missing, ctx.Err(),
				errOrNone(err), shown)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

var errNone = errors.New("no error of the browser")

func errOrNone(err error) error {
	if err == nil {
		return errNone
	}
	return err
}

// Picture returns a PNG of the window. Chromium does not answer if the page is left meanwhile; it is then asked again.
func (p *Page) Picture(ctx context.Context) ([]byte, error) {
	for {
		var r struct{ Data string }
		within, cancel := context.WithTimeout(ctx, 15*time.Second)
		err := p.call(within, "Page.captureScreenshot", map[string]any{"format": "png"}, &r)
		cancel()
		switch {
		case err == nil:
			return base64.StdEncoding.DecodeString(r.Data)
		case ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded):
			return nil, err
		}
	}
}
