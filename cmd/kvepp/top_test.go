package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"kvepp/serve/admin"
)

// TestTopOnce: the tables and the JSON have the numbers of the API.
func TestTopOnce(t *testing.T) {
	s := serveHere(t, threeWorkers, "--load-aware=false")
	s.store("w1", tokenIDs(1000, 400))
	for i := range 3 {
		answer(s.route(tokensRequest(fmt.Sprintf("request-%d", i), tokenIDs(1000, 400), "")), 400, 300)
	}
	running := s.route(tokensRequest("bad\x1b[2Jname", tokenIDs(1000, 400), ""))
	defer running.Free()
	run := func(args ...string) (status int, out, errs string) {
		var o, e bytes.Buffer
		args = append(args, "--admin-address="+strings.TrimPrefix(s.web.URL, "http://"))
		status = runAdmin("top", args, strings.NewReader(""), &o, &e, func(string) string { return "" })
		return status, o.String(), e.String()
	}
	status, out, errs := run() // without a terminal, as with --once
	for _, want := range []string{"3 workers, 1 running, 0 queued", "75.0% of prompt tokens cached", "w0/0", "100/1000",
		"75.0%", "connecting", "request-2", "300/400", "running", "bad?[2Jname"} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("status %d, %s: no %q in\n%s", status, errs, want, out)
		}
	}
	status, out, _ = run("--once", "-o", "json")
	var g glance
	var f admin.Fleet
	s.get("/debug/fleet", &f)
	if err := json.Unmarshal([]byte(out), &g); err != nil || status != 0 || len(g.Decisions) != 4 ||
		len(g.Fleet.Workers) != 3 || g.Fleet.Workers[1].CachedTokens != f.Workers[1].CachedTokens {
		t.Errorf("status %d, %v: %s", status, err, out)
	}
	for args, want := range map[string]string{"-o=json": "give --once", "-o=xml": "text or json",
		"--interval=1ms": "at least", "w0": "unexpected argument"} {
		if status, _, errs := run(args); status != 2 || !strings.Contains(errs, want) {
			t.Errorf("%s: status %d, %s", args, status, errs)
		}
	}
}

// TestTopScreen: keys change what is shown, within the size of the terminal.
func TestTopScreen(t *testing.T) {
	g := &glance{rates: map[string]float64{"w3/0": 7}}
	for i := range 30 {
		g.Fleet.Workers = append(g.Fleet.Workers, admin.FleetWorker{Name: fmt.Sprintf("w%d", i), BookedRequests: i % 7,
			PromptTokens: 100, CachedTokens: uint64(i)})
		g.Decisions = append(g.Decisions, admin.Decision{RequestID: fmt.Sprintf("request-%d", i)})
	}
	s := &topScreen{now: g}
	width := 120
	shown := func(keys string) []string {
		for i := range len(keys) {
			if !s.press(keys[i]) {
				t.Errorf("%q ends", keys)
			}
		}
		text := s.draw(width, 12)
		for _, escape := range []string{"\x1b[H", "\x1b[K", "\x1b[J", "\x1b[1m", "\x1b[0m"} {
			text = strings.ReplaceAll(text, escape, "")
		}
		lines := strings.Split(text, "\r\n")
		if len(lines) > 12 || slices.ContainsFunc(lines, func(l string) bool { return len(l) > width }) {
			t.Errorf("%q: %d lines\n%s", keys, len(lines), text)
		}
		return lines
	}
	for _, c := range []struct{ keys, title, first string }{
		{"", "WORKER*", "w0/0"},
		{"s", "RUN*", "w6/0"},
		{"sssss", "HIT*", "w29/0"},
		{"s", "REQ/S*", "w3/0"},
		{"r", "TTFT", "running"},
		{"f" + strings.Repeat("j", 99), "REQ/S*", "w22/0"}, // 8 rows fit
		{"k\x80\x80", "REQ/S*", "w19/0"},
		{"\t\t", "REQ/S*", "w3/0"},
	} {
		lines := shown(c.keys)
		if !strings.Contains(lines[2], c.title) || !strings.Contains(lines[3], c.first) {
			t.Errorf("%q: want %s, %s:\n%s", c.keys, c.title, c.first, strings.Join(lines, "\n"))
		}
	}
	if width = 40; !strings.Contains(shown("r")[2], "TIME") {
		t.Error("40 columns do not show the requests")
	}
	if s.press('q') || s.press(3) {
		t.Error("q and Ctrl-C do not end")
	}
	width = 120
	s.lost = fmt.Errorf("no\nanswer")
	if text := strings.Join(shown(""), "\n"); !strings.Contains(text, "kvepp does not answer: no?answer") {
		t.Errorf("%s", text)
	}
}

// terminal returns both ends of a pseudo-terminal.
func terminal(t *testing.T) (controller, shell *os.File) {
	t.Helper()
	controller, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { controller.Close() })
	var number, unlock uint32
	size := [4]uint16{24, 160} // rows, columns, pixels
	for request, at := range map[uintptr]*uint32{syscall.TIOCGPTN: &number, syscall.TIOCSPTLCK: &unlock,
		syscall.TIOCSWINSZ: (*uint32)(unsafe.Pointer(&size))} {
		at := uintptr(unsafe.Pointer(at))
		if _, _, code := syscall.Syscall(syscall.SYS_IOCTL, controller.Fd(), request, at); code != 0 {
			t.Fatal(code)
		}
	}
	shell, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { shell.Close() })
	return controller, shell
}

// TestTopInTerminal: the command follows keys in a terminal, and leaves the terminal as it was.
func TestTopInTerminal(t *testing.T) {
	s := serveHere(t, threeWorkers)
	answer(s.route(tokensRequest("request-0", tokenIDs(1000, 40), "")), 40, 0)
	controller, shell := terminal(t)
	ended := make(chan int, 1)
	var errs bytes.Buffer
	go func() {
		args := []string{"--interval=500ms", "--admin-address=" + strings.TrimPrefix(s.web.URL, "http://")}
		ended <- runAdmin("top", args, shell, shell, &errs, func(string) string { return "" })
	}()
	output := make(chan string, 100)
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, err := controller.Read(buffer)
			if err != nil {
				return
			}
			output <- string(buffer[:n])
		}
	}()
	late := time.After(time.Minute)
	await := func(want string) {
		t.Helper()
		for all := ""; !strings.Contains(all, want); {
			select {
			case more := <-output:
				all += more
			case status := <-ended:
				t.Fatalf("ended with %d: %s", status, errs.String())
			case <-late:
				t.Fatalf("no %q in %q", want, all)
			}
		}
	}
	type key struct{ press, shows string }
	await("WORKER*")
	answer(s.route(tokensRequest("request-1", tokenIDs(1000, 40), "")), 40, 0)
	for _, k := range []key{{"r", "request-1"}, {"f", "w2/0"}, {"s", "RUN*"}, {"\t", "request-0"}} {
		if _, err := controller.WriteString(k.press); err != nil {
			t.Fatal(err)
		}
		await(k.shows)
	}
	if _, err := controller.WriteString("q"); err != nil {
		t.Fatal(err)
	}
	select {
	case status := <-ended:
		if status != 0 {
			t.Errorf("status %d: %s", status, errs.String())
		}
	case <-late:
		t.Fatal("q does not end it")
	}
	await("\x1b[?1049l")
}
