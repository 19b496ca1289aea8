package join

import (
	"cmp"
	"fmt"
	"strings"

	"kvepp/pool"
	"kvepp/prompt"
)

// engineURL returns the URL of an endpoint's server; "" without an address.
func (j *Join) engineURL(e *pool.Endpoint) string {
	if e.Address == "" {
		return ""
	}
	return j.Gauges.Scheme + "://" + e.Address
}

// setVersions sets the version of each endpoint's engine: the endpoints file's, the engine's own response, or
// --engine-version. It warns about versions that were not tested, and about addresses of several versions.
func (j *Join) setVersions(endpoints []pool.Endpoint) {
	if j.finder != nil {
		var urls []string
		for i := range endpoints {
			if url := j.engineURL(&endpoints[i]); url != "" && endpoints[i].EngineVersion == "" {
				urls = append(urls, url)
			}
		}
		j.finder.Want(urls)
	}
	untested, engine := 0, j.Models.Engine()
	for i := range endpoints {
		e := &endpoints[i]
		if e.EngineVersion == "" && j.finder != nil {
			response := j.finder.Of(j.engineURL(e))
			if response.Several {
				untested++
				e.OtherTokenizer = true
				j.problems.warn("the engine at %s answers with one version and then another: kvepp routes to it by "+
					"load only. Give each engine an address of its own", e.Address)
				continue
			}
			e.EngineVersion = response.Version
		}
		e.EngineVersion = cmp.Or(e.EngineVersion, j.Models.Prompts.Version)
		if e.EngineVersion == "" {
			continue
		}
		treatedAs, tested, err := prompt.MatchVersion(engine, e.EngineVersion)
		if tested {
			continue
		}
		untested++
		effect := "kvepp follows the rules of " + treatedAs
		if err != nil {
			e.OtherTokenizer = true
			effect = "kvepp routes to its endpoints by load only"
		}
		j.problems.warn("kvepp was not tested with %s %q (but with %s): %s. kvepp check and --tokenizer-check compare "+
			"the token ids", engine, e.EngineVersion, strings.Join(prompt.Versions(engine), ", "), effect)
		if err != nil {
			e.EngineVersion = "" // not a version: nothing else may go by it
		}
	}
	j.Metrics.UntestedVersions.Set(float64(untested))
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
