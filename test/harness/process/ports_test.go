package process

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// TestPorts: what was given is not given again while other ports are left, even to another process, and what is taken
// is not given.
func TestPorts(t *testing.T) {
	if os.Getenv("KVEPP_PORTS_OF_ANOTHER") != "" {
		first, err := Ports(5)
		if err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("ports from " + strconv.Itoa(first) + "\n")
		return
	}
	given := map[int]bool{}
	take := func(n int) int {
		t.Helper()
		first, err := Ports(n)
		if err != nil {
			t.Fatal(err)
		}
		for p := first; p < first+n; p++ {
			if given[p] {
				t.Fatalf("port %d was given twice", p)
			}
			given[p] = true
		}
		return first
	}
	last := take(1)
	taken, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(last+2))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if first := take(3); first != last+3 {
		t.Errorf("three ports from %d after %d, while %d is in use", first, last, last+2)
	}
	for range 20 {
		take(17)
	}

	another := exec.Command(os.Args[0], "-test.run=^TestPorts$", "-test.v")
	another.Env = append(os.Environ(), "KVEPP_PORTS_OF_ANOTHER=1")
	out, err := another.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, after, _ := strings.Cut(string(out), "ports from ")
	line, _, _ := strings.Cut(after, "\n")
	first, err := strconv.Atoi(line)
	if err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if mine := ports.first; first > mine-portBlock && first < mine+portBlock {
		t.Errorf("another process is given ports from %d, this one has those from %d", first, mine)
	}

	for i := range 3 { // all of the block, several times over
		for range portBlock / 100 {
			if _, err := Ports(99); err != nil {
				t.Fatalf("turn %d: %v", i, err)
			}
		}
	}
	if _, err := Ports(portBlock); err == nil {
		t.Error("more ports than a block has")
	}
}
