package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"

	"kvepp/pool"
	"kvepp/pool/engineversion"
	"kvepp/prompt"
)

// The values of --unknown-engine-version.
const (
	nearestVersion  = "nearest"
	loadOnlyVersion = "load"
)

// newFinder returns what asks the engines for their versions, and calls changed after an answer changed; nil if
// --engine-version says the version, no engine says its own, or kvepp never asks engines anything.
func newFinder(o *options, changed func()) *engineversion.Finder {
	paths := engineversion.PathsOf(string(o.config.engine.Engine))
	if o.engineVersion != autoVersion || paths == nil || o.engineGauges.interval == 0 {
		return nil
	}
	client := &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true, // asked once a minute
			// only if the operator asks for it
			TLSClientConfig: &tls.Config{InsecureSkipVerify: o.engineGauges.skipVerify},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return engineversion.New(paths, client, changed)
}

// engineURL returns the URL of an endpoint's server; "" without an address.
func (o *options) engineURL(e *pool.Endpoint) string {
	if e.Address == "" {
		return ""
	}
	return o.engineGauges.scheme + "://" + e.Address
}

// setVersions sets the version of each endpoint's engine: the endpoints file's, the engine's own answer, or
// --engine-version. It warns about versions that were not tested, and about addresses of several versions.
func (f *poolFollower) setVersions(endpoints []pool.Endpoint) {
	if f.finder != nil {
		var urls []string
		for i := range endpoints {
			if url := f.engineURL(&endpoints[i]); url != "" && endpoints[i].EngineVersion == "" {
				urls = append(urls, url)
			}
		}
		f.finder.Want(urls)
	}
	untested := 0
	for i := range endpoints {
		e := &endpoints[i]
		if e.EngineVersion == "" && f.finder != nil {
			answer := f.finder.Of(f.engineURL(e))
			if answer.Several {
				untested++
				e.OtherTokenizer = true
				f.problems.warn(fmt.Sprintf("the engine at %s answers with one version and then another: kvepp routes "+
					"to it by load only. Give each engine an address of its own", e.Address))
				continue
			}
			e.EngineVersion = answer.Version
		}
		e.EngineVersion = cmp.Or(e.EngineVersion, f.config.engine.Version)
		if e.EngineVersion == "" {
			continue
		}
		engine := f.config.engine.Engine
		treatedAs, tested, err := prompt.MatchVersion(engine, e.EngineVersion)
		if tested {
			continue
		}
		untested++
		effect := "kvepp follows the rules of " + treatedAs
		if f.unknownVersion == loadOnlyVersion || err != nil {
			e.OtherTokenizer = true
			effect = "kvepp routes to its endpoints by load only"
		}
		f.problems.warn(fmt.Sprintf("kvepp was not tested with %s %q (but with %s): %s. kvepp check and "+
			"--tokenizer-check compare the token ids", engine, e.EngineVersion,
			strings.Join(prompt.Versions(engine), ", "), effect))
		if err != nil {
			e.EngineVersion = "" // not a version: nothing else may go by it
		}
	}
	f.m.UntestedVersions.Set(float64(untested))
}

// checkVersions returns an error for an endpoint of the endpoints file whose engineVersion is none, or differs from
// that of another endpoint with its address.
func checkVersions(engine prompt.Engine, entries []pool.Entry) error {
	type declared struct{ name, version string }
	byAddress := map[string]declared{}
	for i := range entries {
		e := &entries[i]
		if e.EngineVersion == "" {
			continue
		}
		if _, _, err := prompt.MatchVersion(engine, e.EngineVersion); err != nil {
			return fmt.Errorf("endpoint %q: engineVersion: %q is not a version such as %s", e.Name, e.EngineVersion,
				strings.Join(prompt.Versions(engine), ", "))
		}
		other, twice := byAddress[e.Address]
		if twice && e.Address != "" && other.version != e.EngineVersion {
			return fmt.Errorf("endpoints %q and %q share the address %s, but have engineVersion %s and %s: one "+
				"address is one engine", other.name, e.Name, e.Address, other.version, e.EngineVersion)
		}
		byAddress[e.Address] = declared{e.Name, e.EngineVersion}
	}
	return nil
}

// versionAt returns the model by the rules of the version that the engine at url has. finder is nil if the engines are
// not asked.
func versionAt(
	ctx context.Context,
	finder *engineversion.Finder,
	url string,
	model *prompt.Model,
) *prompt.Model {
	if finder == nil {
		return model
	}
	answer, err := finder.Ask(ctx, url)
	if err != nil || answer.Several {
		return model
	}
	if at, err := model.At(answer.Version); err == nil {
		return at
	}
	return model
}
