package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
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
		response(s.route(tokensRequest(fmt.Sprintf("request-%d", i), tokenIDs(1000, 400), "")), 400, 300)
	}
	running := s.route(tokensRequest("bad\x1b[2Jname", tokenIDs(1000, 400), ""))
	defer running.Free()
	run := func(args ...string) (status int, out, errs string) {
		var o, e bytes.Buffer
		args = append(args, "--admin-address="+strings.TrimPrefix(s.web.URL, "http://"))
		status = runClient("top", args, strings.NewReader(""), &o, &e, func(string) string { return "" })
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
	var g struct {
		Fleet     admin.Fleet
		Decisions []admin.Decision
	}
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
	response(s.route(tokensRequest("request-0", tokenIDs(1000, 40), "")), 40, 0)
	controller, shell := terminal(t)
	ended := make(chan int, 1)
	var errs bytes.Buffer
	go func() {
		args := []string{"--interval=500ms", "--admin-address=" + strings.TrimPrefix(s.web.URL, "http://")}
		ended <- runClient("top", args, shell, shell, &errs, func(string) string { return "" })
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
	response(s.route(tokensRequest("request-1", tokenIDs(1000, 40), "")), 40, 0)
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
