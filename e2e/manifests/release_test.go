package manifests

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/test/harness/process"
)

// The version that make test-release gives.
const testVersion = "0.0.1-test"

// releaseDir returns the folder of a release.
func releaseDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("KVEPP_RELEASE")
	if dir == "" {
		t.Fatal("the release is missing; run make test-release")
	}
	return dir
}

// arches are the processors that the release has programs for.
func arches(t *testing.T) (all []string) {
	t.Helper()
	for _, arch := range []string{"amd64", "arm64"} {
		if _, err := os.Stat(filepath.Join(releaseDir(t), "kvepp-"+testVersion+"-linux-"+arch+".tar.gz")); err == nil {
			all = append(all, arch)
		}
	}
	if len(all) == 0 {
		t.Fatal("the release has no program")
	}
	return all
}

// TestReleaseFiles: the release has all its files, their digests are right, and nothing else is there.
func TestReleaseFiles(t *testing.T) {
	dir := releaseDir(t)
	want := []string{"NOTES.md", "SHA256SUMS", "kvepp-" + testVersion + "-image.tar", "kvepp-" + testVersion + ".tgz",
		"kvepp-" + testVersion + "-kustomize.tar.gz", "kvepp-" + testVersion + ".spdx.json",
		"kvepp-" + testVersion + ".provenance.json"}
	for _, arch := range arches(t) {
		want = append(want, "kvepp-"+testVersion+"-linux-"+arch+".tar.gz", "kvepp_"+testVersion+"_"+arch+".deb")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	sums, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(sums)), "\n")
	if len(lines) != len(want)-1 {
		t.Errorf("%d digests of %d files", len(lines), len(want)-1)
	}
	for _, line := range lines {
		sum, name, _ := strings.Cut(line, "  ")
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if digest := sha256.Sum256(text); hex.EncodeToString(digest[:]) != sum {
			t.Errorf("%s has another digest than SHA256SUMS says", name)
		}
	}
	notes, err := os.ReadFile(filepath.Join(dir, "NOTES.md"))
	if err != nil || !strings.Contains(string(notes), "### ") {
		t.Errorf("NOTES.md: %v, %.200s", err, notes)
	}
}

// TestReleaseIsReproducible: a second run, from a copy of the tree at another path, makes the same bytes.
func TestReleaseIsReproducible(t *testing.T) {
	again := os.Getenv("KVEPP_RELEASE_AGAIN")
	if again == "" {
		t.Fatal("the second release is missing; run make test-release")
	}
	first, err := os.ReadFile(filepath.Join(releaseDir(t), "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(filepath.Join(again, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Errorf("two runs differ:\n%s\n%s", first, second)
	}
}

// unpacked returns the files of a tar archive.
func unpacked(t *testing.T, from io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for archive := tar.NewReader(from); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Mode&0o022 != 0 {
			t.Errorf("%s has owner %d:%d and mode %o", h.Name, h.Uid, h.Gid, h.Mode)
		}
		if files[strings.TrimPrefix(h.Name, "./")], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
	}
}

func gunzipped(t *testing.T, data []byte) io.Reader {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (d descriptor) in(t *testing.T, files map[string][]byte, v any) []byte {
	t.Helper()
	blob := files["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
	if digest := sha256.Sum256(blob); d.Digest != "sha256:"+hex.EncodeToString(digest[:]) {
		t.Fatalf("%s has another digest", d.Digest)
	}
	if v != nil {
		if err := json.Unmarshal(blob, v); err != nil {
			t.Fatal(err)
		}
	}
	return blob
}

// descriptor is that of the OCI image specification.
type descriptor struct {
	Digest      string
	Annotations map[string]string
	Platform    struct{ OS, Architecture string }
}

// TestReleaseImage: the OCI archive has an image for each processor, with the Dockerfile's set-up and the release's
// program.
func TestReleaseImage(t *testing.T) {
	file, err := os.Open(filepath.Join(releaseDir(t), "kvepp-"+testVersion+"-image.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	files := unpacked(t, file)
	var top, index struct{ Manifests []descriptor }
	if err := json.Unmarshal(files["index.json"], &top); err != nil || len(top.Manifests) != 1 ||
		top.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != testVersion {
		t.Fatalf("index.json: %v, %s", err, files["index.json"])
	}
	top.Manifests[0].in(t, files, &index)
	var got []string
	for _, d := range index.Manifests {
		got = append(got, d.Platform.Architecture)
		var manifest struct {
			Config descriptor
			Layers []descriptor
		}
		d.in(t, files, &manifest)
		var config struct {
			Architecture, OS string
			Config           struct {
				User                 string
				Entrypoint, Cmd      []string
				ExposedPorts, Labels map[string]any
				WorkingDir           string
			}
		}
		manifest.Config.in(t, files, &config)
		if c := config.Config; config.Architecture != d.Platform.Architecture || c.User != "65532:65532" ||
			!slices.Equal(c.Entrypoint, []string{"/kvepp"}) || !slices.Equal(c.Cmd, []string{"help"}) ||
			len(c.ExposedPorts) != 3 || c.Labels["org.opencontainers.image.version"] != testVersion {
			t.Errorf("%s: config %+v", d.Platform.Architecture, config)
		}
		root := unpacked(t, gunzipped(t, manifest.Layers[0].in(t, files, nil)))
		if program := programOf(t, d.Platform.Architecture); !bytes.Equal(root["kvepp"], program) ||
			len(root["etc/ssl/certs/ca-certificates.crt"]) == 0 {
			t.Errorf("%s: the layer has another program, or no certificates", d.Platform.Architecture)
		}
	}
	if !slices.Equal(got, arches(t)) {
		t.Errorf("images for %v", got)
	}
}

// programOf returns the program in the release's archive for a processor.
func programOf(t *testing.T, arch string) []byte {
	t.Helper()
	name := "kvepp-" + testVersion + "-linux-" + arch
	text, err := os.ReadFile(filepath.Join(releaseDir(t), name+".tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	files := unpacked(t, gunzipped(t, text))
	if len(files[name+"/LICENSE"]) == 0 || len(files[name+"/README.md"]) == 0 ||
		len(files[name+"/docs/install.md"]) == 0 ||
		!bytes.Contains(files[name+"/THIRD-PARTY-LICENSES"], []byte("google.golang.org/grpc")) {
		t.Errorf("%s has no LICENSE, README.md, docs or THIRD-PARTY-LICENSES", name)
	}
	return files[name+"/kvepp"]
}

// TestReleasePackage: the Debian package has the program and a unit that systemd accepts, and its configuration starts
// kvepp.
func TestReleasePackage(t *testing.T) {
	arch := runtime.GOARCH
	root := t.TempDir()
	deb := filepath.Join(releaseDir(t), "kvepp_"+testVersion+"_"+arch+".deb")
	for _, flag := range []string{"-x", "-e"} {
		to := root
		if flag == "-e" {
			to = filepath.Join(root, "DEBIAN")
		}
		if out, err := exec.CommandContext(t.Context(), "dpkg-deb", flag, deb, to).CombinedOutput(); err != nil {
			t.Fatalf("dpkg-deb %s: %v\n%s", flag, err, out)
		}
	}
	program, err := os.ReadFile(filepath.Join(root, "usr/bin/kvepp"))
	if err != nil || !bytes.Equal(program, programOf(t, arch)) {
		t.Errorf("the package has another program: %v", err)
	}
	control, err := os.ReadFile(filepath.Join(root, "DEBIAN/control"))
	if err != nil || !strings.Contains(string(control), "Version: "+strings.ReplaceAll(testVersion, "-", "~")+"\n") ||
		!strings.Contains(string(control), "Architecture: "+arch+"\n") {
		t.Errorf("control: %v\n%s", err, control)
	}
	unit, err := os.ReadFile(filepath.Join(root, "lib/systemd/system/kvepp.service"))
	if err != nil {
		t.Fatal(err)
	}
	// The files that the package's own files name are in it.
	names := unit
	for _, file := range []string{"kvepp.yaml", "endpoints.yaml"} {
		text, err := os.ReadFile(filepath.Join(root, "etc/kvepp", file))
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, text...)
	}
	named := regexp.MustCompile(`/usr/[a-z/.-]*[a-z]|/etc/kvepp/[a-z.]*[a-z]`).FindAll(names, -1)
	for _, path := range named {
		if _, err := os.Stat(filepath.Join(root, string(path))); err != nil {
			t.Errorf("the package names %s, which it does not have: %v", path, err)
		}
	}
	if len(named) < 5 {
		t.Errorf("the package's files name only %q", named)
	}
	// systemd looks for the program, which is installed only here.
	unit = bytes.ReplaceAll(unit, []byte("/usr/bin/kvepp"), []byte(filepath.Join(root, "usr/bin/kvepp")))
	file := filepath.Join(root, "kvepp.service")
	if err := os.WriteFile(file, unit, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", file).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("kvepp.service:")) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	// The files that the package installs start kvepp; only the ports differ here.
	config, err := os.ReadFile(filepath.Join(root, "etc/kvepp/kvepp.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	config = bytes.ReplaceAll(config, []byte("/etc/kvepp"), []byte(filepath.Join(root, "etc/kvepp")))
	path := filepath.Join(root, "kvepp.yaml")
	if err := os.WriteFile(path, config, 0o600); err != nil {
		t.Fatal(err)
	}
	metrics := free(t)
	kvepp, err := process.Start(t.TempDir(), "kvepp", nil, filepath.Join(root, "usr/bin/kvepp"), "serve",
		"--config", path, "--bind-address=127.0.0.1", "--grpc-port="+port(free(t)), "--grpc-health-port="+port(free(t)),
		"--metrics-address="+metrics)
	if err != nil {
		t.Fatal(err)
	}
	defer kvepp.Stop()
	up(t, "http://"+metrics+"/metrics", kvepp)
}

func up(t *testing.T, url string, on ...*process.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	responds := func() error {
		response, err := http.Get(url)
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	if err := process.Up(ctx, url, responds, on...); err != nil {
		t.Fatal(err)
	}
}

// TestReleaseChart: the packed chart installs this version's image.
func TestReleaseChart(t *testing.T) {
	out, err := run(t, program(t, "helm"), "template", "kvepp",
		filepath.Join(releaseDir(t), "kvepp-"+testVersion+".tgz"), "--kube-version", kubernetes,
		"-f", filepath.Join(base, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out), "image: kvepp:"+testVersion) &&
		!strings.Contains(string(out), `image: "kvepp:`+testVersion+`"`) {
		t.Errorf("the chart installs another image than kvepp:%s", testVersion)
	}
}

// TestReleaseSBOM: the SBOM names the modules that go.mod requires of the program.
func TestReleaseSBOM(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(releaseDir(t), "kvepp-"+testVersion+".spdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	var document struct {
		SPDXVersion string
		Packages    []struct{ Name, VersionInfo string }
	}
	if err := json.Unmarshal(text, &document); err != nil || document.SPDXVersion != "SPDX-2.3" {
		t.Fatalf("%v, %.100s", err, text)
	}
	have := map[string]string{}
	for _, p := range document.Packages {
		have[p.Name] = p.VersionInfo
	}
	for _, want := range []string{"kvepp", "libzmq", "Go standard library", "github.com/pebbe/zmq4", "k8s.io/client-go",
		"google.golang.org/grpc"} {
		if have[want] == "" {
			t.Errorf("the SBOM has no version of %s", want)
		}
	}
}

// TestReleasePrograms runs each processor's program: version, token ids as the build of this tree gives them, and a
// request through Envoy by the configuration that the program prints. Metrics and the requests that the program itself
// sends to engines have the release's version. A foreign program runs under qemu-user.
func TestReleasePrograms(t *testing.T) {
	tools := os.Getenv("KVEPP_TOOLS")
	if tools == "" {
		t.Fatal("Envoy is missing; run make test-release")
	}
	for _, arch := range arches(t) {
		t.Run(arch, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "kvepp")
			if err := os.WriteFile(file, programOf(t, arch), 0o755); err != nil {
				t.Fatal(err)
			}
			kvepp := []string{file}
			if arch != runtime.GOARCH {
				kvepp = []string{map[string]string{"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}[arch], file}
			}
			call := func(stdin string, args ...string) string {
				cmd := exec.CommandContext(t.Context(), kvepp[0], append(slices.Clone(kvepp[1:]), args...)...)
				cmd.Stdin = strings.NewReader(stdin)
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("kvepp %v: %v", args, err)
				}
				return string(out)
			}
			if v := call("", "version"); !strings.HasPrefix(v, "kvepp v"+testVersion+" ") ||
				!strings.HasSuffix(v, "linux/"+arch+"\n") {
				t.Errorf("version: %s", v)
			}
			body := `{"model":"m","messages":[{"role":"user","content":"Grüße, 世界! 123"}]}`
			tokenize := []string{"tokenize", "--model-path=../../test/models/tiny-bytelevel", "--blocks",
				"--kv-cache-block-size=4"}
			cmd := exec.CommandContext(t.Context(), "../../bin/kvepp", tokenize...)
			cmd.Stdin = strings.NewReader(body)
			want, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			if got := call(body, tokenize...); got != string(want) || !strings.Contains(got, "sequence_hashes") {
				t.Errorf("tokenize: %s, want %s", got, want)
			}
			routesOne(t, tools, kvepp, call)
		})
	}
}

// routesOne sends a request through Envoy and a program to a server.
func routesOne(t *testing.T, tools string, kvepp []string, call func(string, ...string) string) {
	t.Helper()
	var asked atomic.Pointer[string] // User-Agent of the latest request for the engine's metrics
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if agent := r.UserAgent(); r.URL.Path == "/metrics" {
			asked.Store(&agent)
		}
		fmt.Fprint(w, `{"choices":[{"message":{"content":"ok"}}]}`)
	}))
	defer engine.Close()
	dir := t.TempDir()
	endpoints := filepath.Join(dir, "endpoints.yaml")
	if err := os.WriteFile(endpoints, fmt.Appendf(nil, "endpoints:\n- {name: w, address: %s, blockSize: 4}\n",
		engine.Listener.Addr()), 0o600); err != nil {
		t.Fatal(err)
	}
	grpc, metrics, gateway := free(t), free(t), free(t)
	config := filepath.Join(dir, "envoy.yaml")
	text := call("", "envoy", "--endpoints", endpoints, "--engine=vllm", "--kvepp-address", grpc,
		"--listen-port="+port(gateway), "--envoy-admin-port=0")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	serve, err := process.Start(dir, "kvepp", nil, append(slices.Clone(kvepp), "serve", "--endpoints", endpoints,
		"--model=m=../../test/models/tiny-bytelevel", "--router-kv-events=false", "--decision-headers",
		"--bind-address=127.0.0.1", "--grpc-port="+port(grpc), "--grpc-health-port="+port(free(t)),
		"--metrics-address="+metrics)...)
	if err != nil {
		t.Fatal(err)
	}
	defer serve.Stop()
	up(t, "http://"+metrics+"/metrics", serve)
	envoy, err := process.Start(dir, "envoy", nil, filepath.Join(tools, "bin/envoy"), "--disable-hot-restart",
		"-l", "error", "-c", config)
	if err != nil {
		t.Fatal(err)
	}
	defer envoy.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	err = process.Until(ctx, func() error {
		response, err := http.Post("http://"+gateway+"/v1/chat/completions", "application/json",
			strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"hello"}]}`))
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if worker := response.Header.Get("x-kvepp-worker"); response.StatusCode != http.StatusOK || worker != "w/0" {
			return fmt.Errorf("%s by worker %q: %s", response.Status, worker, serve.Tail(5))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	err = process.Until(ctx, func() error {
		if agent := asked.Load(); agent == nil || *agent != "kvepp/"+testVersion {
			return fmt.Errorf("an engine is asked by another than kvepp/%s: %v", testVersion, agent)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	response, err := http.Get("http://" + metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	if err != nil || !strings.Contains(string(page), `kvepp_build_info{version="v`+testVersion+`"} 1`) {
		t.Errorf("kvepp_build_info has not the version v%s: %v", testVersion, err)
	}
}
