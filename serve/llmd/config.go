package llmd

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"kvepp/internal/suggest"
)

// The apiVersions. All have the same keys, but for some of dataLayer, and two that the latest has no more.
const (
	latest    = "llm-d.ai/v1"
	before    = "llm-d.ai/v1alpha1"
	extension = "inference.networking.x-k8s.io/v1alpha1"
)

// The shapes of a document. Scheduling profiles name any plugins, which readProfiles checks.
const (
	bandShape = "{priority: int, maxBytes: quantity, maxRequests: quantity, fairnessPolicyRef: fairness, " +
		"orderingPolicyRef: ordering, defaultRequestTTL: duration}"
	topShape = `{apiVersion, kind, featureGates: [text], plugins: [{name, type, parameters: any}],
		schedulingProfiles: [{name, plugins: [{pluginRef, weight: float}]}],
		flowControl: {maxBytes: quantity, maxRequests: quantity, defaultRequestTTL: duration,
		noEndpointRequestTTL: duration, priorityBands: [` + bandShape + `], defaultPriorityBand: ` + bandShape + `,
		defaultNegativePriorityBand: ` + bandShape + `, usageLimitPolicyPluginRef: usage,
		bandSelectionPolicyPluginRef: band, saturationDetector: {pluginRef: detector}, enableEviction: bool},
		requestHandler: {parsers: [{pluginRef: parser}], propagatePriority: bool},
		dataLayer: {injectDefaults: bool, sources: [{pluginRef: source, extractors: [{pluginRef: extractor}]}],
		discovery: {endpoints: {pluginRef: endpoints}, peers: {pluginRef: peers}, pluginRef: endpoints}, `
	latestShape = topShape + "crossReplica: {syncerPluginRef, syncInterval: duration, publishTimeout: duration}}}"
	beforeShape = topShape + `peerDiscovery: {pluginRef: peers}, crossReplicaSyncerPluginRef,
		crossReplicaSyncInterval: duration, crossReplicaPublishTimeout: duration},
		saturationDetector: {pluginRef: detector}, parser: {pluginRef: parser}}`
)

// defaultConfig is what llm-d's picker takes without a configuration.
const defaultConfig = `{apiVersion: llm-d.ai/v1, plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer},
	{type: prefix-cache-scorer}]}`

// plugin is a plugin that a configuration declares.
type plugin struct {
	*Plugin
	name, kind string
	line       int
	parameters *value
	refers     []reference // in the parameters
	limit      requirement // of Pods' labels; nil: none
	used       bool        // by a profile or another plugin
	resolved   bool        // it does not refer to itself
}

// config is a configuration that llm-d's picker would accept.
type config struct {
	*value   // the document
	plugins  []*plugin
	profiles map[string][]*plugin
	profile  string  // the first
	handler  *plugin // of profiles; nil: llm-d's for one profile
	gates    map[string]bool
	notes    []string
}

// knownGates are the feature gates.
var knownGates = []string{"flowControl", "haPopulateNonLeaderDatastore"}

// read reads a configuration as strictly as llm-d's picker does. gates follow those of the document. alpha allows
// plugins of maturity alpha.
func read(text string, gates []string, alpha bool) (*config, error) {
	root, err := parse(text)
	if err == nil && root == nil {
		root, err = parse(defaultConfig)
	}
	if err != nil {
		return nil, err
	}
	c, r := &config{gates: map[string]bool{}, profiles: map[string][]*plugin{}}, &reader{left: maxValues}
	shape, version := latestShape, (*value)(root).at("apiVersion")
	switch known := []string{latest, before, extension}; {
	case version == nil && root.Kind == yaml.MappingNode:
		c.notes = append(c.notes, "the configuration has no apiVersion: kvepp reads it as "+latest)
	case version != nil && !slices.Contains(known, version.Value):
		return nil, wrong(version.Line, "apiVersion %q: must be one of %s%s", version.Value, strings.Join(known, ", "),
			suggest.DidYouMean(version.Value, "", known))
	case version.text() != latest:
		shape = beforeShape
	}
	if c.value, err = r.read(root, shapeOf(shape), "", 0); err != nil {
		return nil, err
	}
	if kind := c.at("kind"); kind.text() != "EndpointPickerConfig" && kind.text() != "" {
		return nil, wrong(kind.Line, "kind %q: must be EndpointPickerConfig", kind.Value)
	}
	return c, cmp.Or(c.readGates(append(c.at("featureGates").texts(), gates...)), c.readPlugins(r, alpha),
		c.readProfiles(), c.resolve(r.references), c.checkBands())
}

func (c *config) readGates(gates []string) error {
	for _, gate := range gates {
		name, on, given := strings.Cut(strings.TrimSpace(gate), "=")
		if !slices.Contains(knownGates, name) {
			return fmt.Errorf("feature gate %q: llm-d has no such gate%s", name,
				suggest.DidYouMean(name, "", knownGates))
		}
		yes, err := strconv.ParseBool(on)
		if given && err != nil {
			return fmt.Errorf("feature gate %q: must be NAME, NAME=true or NAME=false", gate)
		}
		c.gates[name] = !given || yes
	}
	return nil
}

// about begins an error about a plugin.
func (p *plugin) about() string { return fmt.Sprintf("plugin %q (%s)", p.name, p.kind) }

func (c *config) readPlugins(r *reader, alpha bool) error {
	var known []string
	for i := range Plugins {
		known = append(known, Plugins[i].Type)
	}
	for _, v := range c.at("plugins").list() {
		p := &plugin{kind: v.at("type").text(), line: v.Line}
		p.name, p.Plugin = cmp.Or(v.at("name").text(), p.kind), pluginOf(p.kind)
		switch before := c.named(p.name); {
		case p.kind == "":
			return wrong(p.line, "plugin %q has no type", p.name)
		case p.Plugin == nil:
			return wrong(v.at("type").Line, "%s: llm-d has no plugin of this type%s", p.about(),
				suggest.DidYouMean(p.kind, "", known))
		case before != nil:
			return wrong(p.line, "%s: line %d has a plugin of the same name", p.about(), before.line)
		case p.alpha && !alpha:
			return wrong(p.line, "%s is experimental: give --allow-experimental-plugins", p.about())
		case p.may("handler") && c.handler != nil:
			return wrong(p.line, "%s: %s is a profile handler too, and there must be one", p.about(), c.handler.about())
		case p.may("handler"):
			c.handler = p
		}
		if at := v.at("parameters"); at != nil {
			var err error
			known := len(r.references)
			r.about, r.folds = p.about()+": parameters: ", true
			if p.parameters, err = r.read((*yaml.Node)(at), p.shape, "", 0); err != nil {
				return fmt.Errorf("%s: parameters: %w", p.about(), err)
			}
			p.refers = r.references[known:]
		}
		c.plugins = append(c.plugins, p)
	}
	return nil
}

// named returns the plugin with a name; nil if there is none.
func (c *config) named(name string) *plugin {
	for _, p := range c.plugins {
		if p.name == name {
			return p
		}
	}
	return nil
}

// unknown is an error about a reference that names no plugin.
func (c *config) unknown(line int, key, name string) error {
	var known []string
	for _, p := range c.plugins {
		known = append(known, p.name)
	}
	return wrong(line, "%s %q: no plugin has this name%s", key, name, suggest.DidYouMean(name, "", known))
}

// readProfiles reads the profiles. Without any there is one, with each filter, scorer and picker.
func (c *config) readProfiles() error {
	for _, v := range c.at("schedulingProfiles").list() {
		name := v.at("name").text()
		if name == "" {
			return wrong(v.Line, "a scheduling profile has no name")
		}
		about := fmt.Sprintf("scheduling profile %q", name)
		if _, taken := c.profiles[name]; taken {
			return wrong(v.Line, "%s: another one has the same name", about)
		}
		c.profile, c.profiles[name] = cmp.Or(c.profile, name), []*plugin{}
		for _, ref := range v.at("plugins").list() {
			p := c.named(ref.at("pluginRef").text())
			if p == nil {
				return c.unknown(ref.Line, about+": pluginRef", ref.at("pluginRef").text())
			}
			p.used = true
			c.profiles[name] = append(c.profiles[name], p)
		}
	}
	for _, p := range c.plugins {
		if c.profile == "" && p.chooses() && !p.may("detector") {
			p.used = true
			c.profiles[""] = append(c.profiles[""], p)
		}
	}
	switch {
	case len(c.profiles) < 2:
		return nil
	case c.handler == nil:
		return errors.New("several scheduling profiles need a profile handler, such as disagg-profile-handler")
	case c.handler.kind == "single-profile-handler":
		return wrong(c.handler.line, "%s: there are %d scheduling profiles", c.handler.about(), len(c.profiles))
	}
	return nil
}

// chooses reports whether a plugin belongs into scheduling profiles.
func (p *plugin) chooses() bool { return p.may("filter") || p.may("scorer") || p.may("picker") }

// follow returns an error if a plugin that path led to refers to one of path.
func (c *config) follow(p *plugin, path []string) error {
	if p == nil || p.resolved {
		return nil
	}
	path = append(slices.Clip(path), p.name)
	if slices.Index(path, p.name) < len(path)-1 {
		return wrong(p.line, "%s refers to itself: %s", p.about(), strings.Join(path, " -> "))
	}
	for _, ref := range p.refers {
		if err := c.follow(c.named(ref.name), path); err != nil {
			return err
		}
	}
	p.resolved = true
	return nil
}

// resolve checks that the references name plugins that may be used so, and that no plugin refers to itself through
// others. A default plugin has the name of its type and need not be declared.
func (c *config) resolve(references []reference) error {
	for _, ref := range references {
		kind := pluginOf(ref.name)
		if p := c.named(ref.name); p != nil {
			p.used, kind = true, p.Plugin
		} else if ref.role == "decider" {
			kind = nil
		}
		if kind == nil {
			return c.unknown(ref.line, ref.key, ref.name)
		} else if !kind.may(ref.role) && !(ref.role == "extractor" && kind.may("producer")) {
			return wrong(ref.line, "%s: %q is a plugin of type %s, which is no %s", ref.key, ref.name, kind.Type,
				ref.role)
		}
	}
	for _, p := range c.plugins {
		if err := c.follow(p, nil); err != nil {
			return err
		}
	}
	return nil
}

func (c *config) checkBands() error {
	seen := map[int]bool{}
	for _, band := range c.at("flowControl.priorityBands").list() {
		priority := band.at("priority").number(0)
		if seen[priority] {
			return wrong(band.Line, "flowControl.priorityBands: two bands have priority %d", priority)
		}
		seen[priority] = true
	}
	return nil
}
