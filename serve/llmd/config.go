package llmd

import (
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

const (
	bandShape = "{priority int, maxBytes quantity, maxRequests quantity, fairnessPolicyRef @fairness, " + bandRest
	bandRest  = "orderingPolicyRef @ordering, defaultRequestTTL duration}"
	refShape  = "{pluginRef text}"
	topShape  = "apiVersion text, kind text, featureGates []text, plugins []{name text, type text, parameters any}, " +
		"schedulingProfiles []{name text, plugins []{pluginRef text, weight float}}, " +
		"flowControl {maxBytes quantity, maxRequests quantity, defaultRequestTTL duration, " +
		"noEndpointRequestTTL duration, priorityBands []" + bandShape + ", defaultPriorityBand " + bandShape +
		", defaultNegativePriorityBand " + bandShape + ", usageLimitPolicyPluginRef @usage, " +
		"bandSelectionPolicyPluginRef @band, saturationDetector {pluginRef @detector}, enableEviction bool}, " +
		"requestHandler {parsers []" + refShape + ", propagatePriority bool}, " +
		"dataLayer {injectDefaults bool, sources []{pluginRef @source, extractors []{pluginRef @extractor}}, " +
		"discovery {endpoints {pluginRef @endpoints}, peers {pluginRef @peers}, pluginRef @endpoints}"
	latestShape = topShape + ", crossReplica {syncerPluginRef text, syncInterval duration, publishTimeout duration}}"
	beforeShape = topShape + ", peerDiscovery {pluginRef @peers}, crossReplicaSyncerPluginRef text, " +
		"crossReplicaSyncInterval duration, crossReplicaPublishTimeout duration}, " +
		"saturationDetector {pluginRef @detector}, parser " + refShape
)

// defaultConfig is what llm-d's picker takes without a configuration.
const defaultConfig = `
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {type: prefix-cache-scorer}]
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
`

// plugin is a plugin that a configuration declares.
type plugin struct {
	*Plugin
	name, kind string
	line       int
	parameters *value
	refers     []reference // in the parameters
	used       bool        // by a profile or another plugin
	weight     string      // in a profile; empty: none given
}

// profile is a scheduling profile.
type profile struct {
	name    string
	plugins []*plugin
}

// config is a configuration that llm-d's picker would accept.
type config struct {
	document *value
	plugins  []*plugin
	profiles []profile
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
	r := &reader{left: maxValues}
	c := &config{gates: map[string]bool{}}
	shape, err := c.version(root)
	if err != nil {
		return nil, err
	}
	if c.document, err = r.read(root, shapeOf(shape), "", 0); err != nil {
		return nil, err
	}
	if kind := c.document.at("kind").text(); kind != "EndpointPickerConfig" && kind != "" {
		return nil, wrong(c.document.at("kind").line(), "kind %q: must be EndpointPickerConfig", kind)
	}
	var all []string
	for _, gate := range c.document.at("featureGates").list() {
		all = append(all, gate.text())
	}
	all = append(all, gates...)
	for _, step := range []func() error{
		func() error { return c.readGates(all) },
		func() error { return c.readPlugins(r, alpha) },
		c.readProfiles,
		func() error { return c.resolve(r.references) },
		c.checkBands,
		c.checkHandlers,
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// version returns the shape of the document's apiVersion.
func (c *config) version(root *yaml.Node) (string, error) {
	if root.Kind != yaml.MappingNode {
		return "", wrong(root.Line, "must be an object with apiVersion, kind and plugins")
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value != "apiVersion" {
			continue
		}
		switch v := root.Content[i+1]; v.Value {
		case latest:
			return latestShape, nil
		case before, extension:
			return beforeShape, nil
		default:
			known := []string{latest, before, extension}
			return "", wrong(v.Line, "apiVersion %q: must be one of %s%s", v.Value, strings.Join(known, ", "),
				suggest.DidYouMean(v.Value, "", known))
		}
	}
	c.notes = append(c.notes, "the configuration has no apiVersion: kvepp reads it as "+latest)
	return latestShape, nil
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
	for _, v := range c.document.at("plugins").list() {
		p := &plugin{kind: v.at("type").text(), line: v.node.Line}
		if p.name = v.at("name").text(); p.name == "" {
			p.name = p.kind
		}
		switch p.Plugin = pluginOf(p.kind); {
		case p.kind == "":
			return wrong(p.line, "plugin %q has no type", p.name)
		case p.Plugin == nil:
			return wrong(v.at("type").line(), "%s: llm-d has no plugin of this type%s", p.about(),
				suggest.DidYouMean(p.kind, "", types()))
		case c.named(p.name) != nil:
			return wrong(p.line, "%s: line %d has a plugin of the same name", p.about(), c.named(p.name).line)
		case p.alpha && !alpha:
			return wrong(p.line, "%s is experimental: give --allow-experimental-plugins", p.about())
		}
		if at := v.at("parameters"); at != nil && !p.loose {
			own := &reader{left: r.left, folds: true}
			var err error
			if p.parameters, err = own.read(at.node, shapeOf(p.shape), "", 0); err != nil {
				return fmt.Errorf("%s: parameters: %w", p.about(), err)
			}
			r.left, p.refers = own.left, own.references
		}
		c.plugins = append(c.plugins, p)
	}
	return nil
}

func types() (all []string) {
	for i := range Plugins {
		all = append(all, Plugins[i].Type)
	}
	return all
}

// named returns the plugin with a name; nil if there is none.
func (c *config) named(name string) *plugin {
	i := slices.IndexFunc(c.plugins, func(p *plugin) bool { return p.name == name })
	if i < 0 {
		return nil
	}
	return c.plugins[i]
}

func (c *config) names() (all []string) {
	for _, p := range c.plugins {
		all = append(all, p.name)
	}
	return all
}

// readProfiles reads the profiles. Without any there is one, with each filter, scorer and picker.
func (c *config) readProfiles() error {
	for _, v := range c.document.at("schedulingProfiles").list() {
		f := profile{name: v.at("name").text()}
		if f.name == "" {
			return wrong(v.node.Line, "a scheduling profile has no name")
		}
		if slices.ContainsFunc(c.profiles, func(other profile) bool { return other.name == f.name }) {
			return wrong(v.node.Line, "scheduling profile %q: another one has the same name", f.name)
		}
		for _, ref := range v.at("plugins").list() {
			p := c.named(ref.at("pluginRef").text())
			if p == nil {
				return wrong(ref.node.Line, "scheduling profile %q: pluginRef %q: no plugin has this name%s", f.name,
					ref.at("pluginRef").text(), suggest.DidYouMean(ref.at("pluginRef").text(), "", c.names()))
			}
			if p.used = true; p.may("scorer") {
				p.weight = ref.at("weight").text()
			}
			f.plugins = append(f.plugins, p)
		}
		c.profiles = append(c.profiles, f)
	}
	if len(c.profiles) == 0 {
		f := profile{name: "default"}
		for _, p := range c.plugins {
			if (p.may("filter") || p.may("scorer") || p.may("picker")) && !p.may("detector") {
				p.used = true
				f.plugins = append(f.plugins, p)
			}
		}
		c.profiles = []profile{f}
	}
	return nil
}

// resolve checks that the references name plugins that may be used so, and that no plugin refers to itself through
// others.
func (c *config) resolve(references []reference) error {
	for _, ref := range references {
		if err := c.check(ref); err != nil {
			return err
		}
	}
	for _, v := range c.document.at("requestHandler.parsers").list() {
		ref := reference{"requestHandler.parsers", v.at("pluginRef").text(), "parser", v.node.Line}
		if err := c.check(ref); err != nil {
			return err
		}
	}
	for _, p := range c.plugins {
		for _, ref := range p.refers {
			if err := c.check(ref); err != nil {
				return fmt.Errorf("%s: parameters: %w", p.about(), err)
			}
		}
	}
	finished := map[string]bool{}
	var visit func(name string, path []string) error
	visit = func(name string, path []string) error {
		p := c.named(name)
		if p == nil || finished[name] {
			return nil
		}
		if slices.Contains(path, name) {
			return wrong(p.line, "%s refers to itself: %s", p.about(), strings.Join(append(path, name), " -> "))
		}
		for _, ref := range p.refers {
			if err := visit(ref.name, append(slices.Clone(path), name)); err != nil {
				return err
			}
		}
		finished[name] = true
		return nil
	}
	for _, p := range c.plugins {
		if err := visit(p.name, nil); err != nil {
			return err
		}
	}
	return nil
}

// check checks one reference. A default plugin has the name of its type and need not be declared.
func (c *config) check(ref reference) error {
	kind := pluginOf(ref.name)
	if p := c.named(ref.name); p != nil {
		p.used, kind = true, p.Plugin
	} else if ref.role == "decider" {
		kind = nil
	}
	switch {
	case kind == nil:
		return wrong(ref.line, "%s: %q: no plugin has this name%s", ref.key, ref.name,
			suggest.DidYouMean(ref.name, "", c.names()))
	case !kind.may(ref.role):
		return wrong(ref.line, "%s: %q is a plugin of type %s, which is no %s", ref.key, ref.name, kind.Type, ref.role)
	}
	return nil
}

func (c *config) checkBands() error {
	seen := map[int]bool{}
	for _, band := range c.document.at("flowControl.priorityBands").list() {
		priority := band.at("priority").number(0)
		if seen[priority] {
			return wrong(band.node.Line, "flowControl.priorityBands: two bands have priority %d", priority)
		}
		seen[priority] = true
	}
	return nil
}

func (c *config) checkHandlers() error {
	var handler *plugin
	for _, p := range c.plugins {
		switch {
		case !p.may("handler"):
		case handler != nil:
			return wrong(p.line, "%s: %s is a profile handler too, and there must be one", p.about(), handler.about())
		default:
			handler = p
		}
	}
	switch {
	case len(c.profiles) < 2:
		return nil
	case handler == nil:
		return errors.New("several scheduling profiles need a profile handler, such as disagg-profile-handler")
	case handler.kind == "single-profile-handler":
		return wrong(handler.line, "%s: there are %d scheduling profiles", handler.about(), len(c.profiles))
	}
	return nil
}
