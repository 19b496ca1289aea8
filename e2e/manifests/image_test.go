package manifests

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/test/harness/process"
)

// TestImage runs kvepp in the image's root file system alone, as the image's user, who can write nothing there.
func TestImage(t *testing.T) {
	root := os.Getenv("KVEPP_ROOTFS")
	if root == "" {
		t.Fatal("the image's root file system is missing; run make test-image")
	}
	if os.Getuid() != 0 {
		t.Fatal("only root may call chroot; run sudo make test-image")
	}
	endpoints := filepath.Join(root, "endpoints.yaml")
	if err := os.WriteFile(endpoints, []byte("endpoints:\n- {name: w, address: 127.0.0.1:1}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(endpoints)
	for _, command := range [][]string{{"/kvepp", "serve"}, {"/app/epp", ""}, {"/kvepp", "--v=2"}} {
		t.Run(strings.Join(command, " "), func(t *testing.T) { runImage(t, root, command) })
	}
	began := time.Now()
	sleep := exec.CommandContext(t.Context(), "/bin/sleep", "0.3")
	sleep.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	if out, err := sleep.CombinedOutput(); err != nil || time.Since(began) < 300*time.Millisecond {
		t.Errorf("/bin/sleep: %v after %v\n%s", err, time.Since(began), out)
	}
}

// runImage runs a command of the image until its metrics answer, and ends it.
func runImage(t *testing.T, root string, command []string) {
	t.Helper()
	address := free(t)
	cmd := exec.CommandContext(
		t.Context(),
		command[0],
		command[1],
		"--endpoints=/endpoints.yaml",
		"--bind-address=127.0.0.1",
		"--grpc-port="+port(free(t)),
		"--grpc-health-port="+port(free(t)),
		"--metrics-address="+address,
	)
	cmd.Dir, cmd.Env = "/", []string{"TZ=Asia/Tokyo"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:     root,
		Credential: &syscall.Credential{Uid: 65532, Gid: 65532},
		Pdeathsig:  syscall.SIGKILL,
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	scrape(t, address, ended, &out)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, out.String())
	}
	if !strings.Contains(out.String(), "+09:00") {
		t.Errorf("TZ has no effect in the image:\n%s", out.String())
	}
}

// TestImagesAreOne checks that an image without base images has the same set-up as the Dockerfile's.
func TestImagesAreOne(t *testing.T) {
	docker, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile("../../manifests/image/import.sh")
	if err != nil {
		t.Fatal(err)
	}
	_, last, ok := strings.Cut(string(docker), "\nFROM scratch\n")
	if !ok {
		t.Fatal("the Dockerfile's last stage is not from scratch")
	}
	want := regexp.MustCompile(`(?m)^(USER|EXPOSE|ENTRYPOINT|CMD) .*$`).FindAllString(last, -1)
	var got []string
	for _, m := range regexp.MustCompile(`-c '([^']*)'`).FindAllStringSubmatch(string(script), -1) {
		got = append(got, m[1])
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) || len(got) != 4 {
		t.Errorf("import.sh says %q, the Dockerfile %q", got, want)
	}
}

// free returns an address of this machine at which no process listens.
func free(t *testing.T) string {
	t.Helper()
	port, err := process.Ports(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

func port(address string) string { return address[strings.LastIndexByte(address, ':')+1:] }

// scrape waits for kvepp's metrics and returns them. ended reports its end; out has its output until then.
func scrape(t *testing.T, address string, ended <-chan error, out fmt.Stringer) *http.Response {
	t.Helper()
	for deadline := time.After(time.Minute); ; {
		if response, err := http.Get("http://" + address + "/metrics"); err == nil {
			if response.StatusCode != http.StatusOK {
				t.Fatalf("metrics: %s", response.Status)
			}
			t.Cleanup(func() { response.Body.Close() })
			return response
		}
		select {
		case err := <-ended:
			t.Fatalf("kvepp ended: %v\n%s", err, out)
		case <-deadline:
			t.Fatal("kvepp served no metrics within a minute")
		case <-time.After(20 * time.Millisecond):
		}
	}
}
