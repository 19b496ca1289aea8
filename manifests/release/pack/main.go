// Program pack makes the parts of a release that a shell cannot: the OCI archive of the image, the SBOM and the
// provenance statement. Its output depends on its input alone.
//
//	pack -what image,sbom -version 1.2.3 -commit SHA -epoch SECONDS -out DIR amd64=ROOT arm64=ROOT
//	pack -what provenance ...
//
// ROOT is the root file system of the image for a processor, as manifests/image/rootfs.sh makes it.
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("pack: ")
	var r release
	epoch := flag.Int64("epoch", 0, "time of the release, in seconds since 1970")
	flag.StringVar(&r.version, "version", "", "version")
	flag.StringVar(&r.commit, "commit", "", "git commit")
	flag.StringVar(&r.libzmq, "libzmq", "unknown", "version of libzmq")
	flag.StringVar(&r.out, "out", "", "folder")
	what := flag.String("what", "",
		"what to make: image, sbom, provenance (of all files in the folder), with commas between")
	flag.Parse()
	r.at = time.Unix(*epoch, 0).UTC()
	for _, arg := range flag.Args() {
		arch, root, ok := strings.Cut(arg, "=")
		if !ok {
			log.Fatalf("%q: want ARCH=ROOT", arg)
		}
		r.roots = append(r.roots, root)
		r.arches = append(r.arches, arch)
	}
	parts := map[string]func() error{"image": r.image, "sbom": r.sbom, "provenance": r.provenance}
	for part := range strings.SplitSeq(*what, ",") {
		if parts[part] == nil {
			log.Fatalf("-what %q: want image, sbom or provenance", part)
		}
		if err := parts[part](); err != nil {
			log.Fatal(err)
		}
	}
}

type release struct {
	version, commit, libzmq, out string
	at                           time.Time
	arches, roots                []string
}

func (r *release) file(suffix string) string { return filepath.Join(r.out, "kvepp-"+r.version+suffix) }

// image writes the OCI archive.
func (r *release) image() error {
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for i, arch := range r.arches {
		var layerTar bytes.Buffer
		if err := writeTar(&layerTar, r.roots[i], r.at); err != nil {
			return err
		}
		layer, err := tarball.LayerFromOpener(
			func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layerTar.Bytes())), nil },
			tarball.WithMediaType(types.OCILayer),
		)
		if err != nil {
			return err
		}
		image, err := mutate.Append(mutate.MediaType(empty.Image, types.OCIManifestSchema1), mutate.Addendum{
			Layer: layer, History: v1.History{Created: v1.Time{Time: r.at}, CreatedBy: "kvepp, release.sh"},
		})
		if err != nil {
			return err
		}
		config, err := image.ConfigFile()
		if err != nil {
			return err
		}
		config.Architecture, config.OS, config.Created = arch, "linux", v1.Time{Time: r.at}
		config.Config = v1.Config{
			User:         "65532:65532",
			Entrypoint:   []string{"/kvepp"},
			Cmd:          []string{"help"},
			ExposedPorts: map[string]struct{}{"9002/tcp": {}, "9003/tcp": {}, "9090/tcp": {}},
			Labels: map[string]string{
				"org.opencontainers.image.title":    "kvepp",
				"org.opencontainers.image.version":  r.version,
				"org.opencontainers.image.revision": r.commit,
			},
		}
		if image, err = mutate.ConfigFile(image, config); err != nil {
			return err
		}
		image = mutate.ConfigMediaType(image, types.OCIConfigJSON)
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	dir, err := os.MkdirTemp("", "kvepp-image")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	name := layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": r.version,
		"io.containerd.image.name":          "kvepp:" + r.version,
	})
	if err := path.AppendIndex(index, name); err != nil {
		return err
	}
	file, err := os.Create(r.file("-image.tar"))
	if err != nil {
		return err
	}
	if err := writeTar(file, dir, r.at); err != nil {
		return err
	}
	return file.Close()
}

// writeTar writes the files of a folder in order of their names, owned by root, with the time at.
func writeTar(to io.Writer, dir string, at time.Time) error {
	out := tar.NewWriter(to)
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		name, _ := filepath.Rel(dir, path)
		if err != nil || name == "." {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if info.IsDir() || info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		header := &tar.Header{Name: name, Mode: mode, ModTime: at, Typeflag: tar.TypeReg, Size: info.Size(),
			Format: tar.FormatPAX}
		switch {
		case info.IsDir():
			header.Name, header.Typeflag, header.Size = name+"/", tar.TypeDir, 0
		case info.Mode()&fs.ModeSymlink != 0:
			header.Mode, header.Typeflag, header.Size = 0o755, tar.TypeSymlink, 0
			if header.Linkname, err = os.Readlink(path); err != nil {
				return err
			}
		}
		if err := out.WriteHeader(header); err != nil || header.Typeflag != tar.TypeReg {
			return err
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		_, err = io.Copy(out, file)
		return err
	})
	if err != nil {
		return err
	}
	return out.Close()
}

// sbom writes the packages in the programs, which are equal for all processors.
func (r *release) sbom() error {
	info, err := buildinfo.ReadFile(filepath.Join(r.roots[0], "kvepp"))
	if err != nil {
		return err
	}
	document := &spdx.Document{
		SPDXVersion:       spdx.Version,
		DataLicense:       spdx.DataLicense,
		SPDXIdentifier:    "DOCUMENT",
		DocumentName:      "kvepp-" + r.version,
		DocumentNamespace: "https://spdx.org/spdxdocs/kvepp-" + r.version + "-" + r.commit,
		CreationInfo: &spdx.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "kvepp-release"}},
			Created:  r.at.Format(time.RFC3339),
		},
	}
	add := func(id, name, version, purl string) {
		p := &spdx.Package{
			PackageName: name, PackageSPDXIdentifier: common.ElementID(id), PackageVersion: version,
			PackageDownloadLocation: "NOASSERTION", PackageLicenseConcluded: "NOASSERTION",
			PackageLicenseDeclared: "NOASSERTION", PackageCopyrightText: "NOASSERTION",
		}
		if purl != "" {
			p.PackageExternalReferences = []*spdx.PackageExternalReference{
				{Category: "PACKAGE-MANAGER", RefType: "purl", Locator: purl},
			}
		}
		relation, from := "CONTAINS", common.ElementID("kvepp")
		if id == "kvepp" {
			relation, from = "DESCRIBES", "DOCUMENT"
		}
		document.Packages = append(document.Packages, p)
		document.Relationships = append(document.Relationships, &spdx.Relationship{
			RefA:         common.MakeDocElementID("", string(from)),
			RefB:         common.MakeDocElementID("", id),
			Relationship: relation,
		})
	}
	add("kvepp", "kvepp", r.version, "")
	go_ := strings.TrimPrefix(info.GoVersion, "go")
	add("go", "Go standard library", go_, "pkg:golang/stdlib@"+go_)
	add("libzmq", "libzmq", r.libzmq, "")
	for i, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		add(fmt.Sprintf("module-%d", i), m.Path, m.Version, "pkg:golang/"+m.Path+"@"+m.Version)
	}
	var text bytes.Buffer
	if err := spdxjson.Write(document, &text, spdxjson.Indent(" ")); err != nil {
		return err
	}
	return os.WriteFile(r.file(".spdx.json"), text.Bytes(), 0o644)
}

// provenance writes an in-toto statement about the files that are in the folder now. It is not signed:
// the publisher of a release signs it.
func (r *release) provenance() error {
	type subject struct {
		Name   string            `json:"name"`
		Digest map[string]string `json:"digest"`
	}
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var subjects []subject
	for _, e := range entries {
		if e.Name() == "NOTES.md" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		sum := sha256.Sum256(text)
		subjects = append(subjects, subject{e.Name(), map[string]string{"sha256": hex.EncodeToString(sum[:])}})
	}
	slices.SortFunc(subjects, func(a, b subject) int { return strings.Compare(a.Name, b.Name) })
	statement := map[string]any{
		"_type":         "https://in-toto.io/Statement/v1",
		"subject":       subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": map[string]any{
			"buildDefinition": map[string]any{
				"buildType":          "make release",
				"externalParameters": map[string]any{"version": r.version, "architectures": r.arches},
				"resolvedDependencies": []any{
					map[string]any{"name": "kvepp", "digest": map[string]string{"gitCommit": r.commit}},
				},
			},
			"runDetails": map[string]any{"builder": map[string]any{"id": "manifests/release/release.sh"}},
		},
	}
	text, err := json.MarshalIndent(statement, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(r.file(".provenance.json"), append(text, '\n'), 0o644)
}
