package llmd

import (
	"fmt"
	"net"
	"strconv"

	"go.yaml.in/yaml/v3"
)

const endpointsShape = "endpoints []{name text, namespace text, address text, port text, labels texts}"

// entry is an endpoint in kvepp's endpoints file.
type entry struct {
	Name    string `yaml:"name"`
	Address string `yaml:"address"`
	Role    string `yaml:"role"`
}

// Endpoints translates a file of llm-d's file-discovery into kvepp's endpoints file. stages says what an endpoint with
// these labels may do, as [Settings.Stages]; nil: llm-d.ai/role says it. skipped names the entries that cannot be used.
// An error is about the whole file.
func Endpoints(text []byte, stages func(map[string]string) (prefill, decode bool)) (file []byte, skipped []string,
	err error) {
	root, err := parse(string(text))
	if err != nil || root == nil {
		return []byte("endpoints: []\n"), nil, err
	}
	r := &reader{left: maxValues}
	v, err := r.read(root, shapeOf(endpointsShape), "", 0)
	if err != nil {
		return nil, nil, err
	}
	if stages == nil {
		stages = func(labels map[string]string) (bool, bool) {
			prefill := Requirement{[]term{{key: roleLabel, values: prefillRoles}}}
			decode := Requirement{[]term{{key: roleLabel, values: decodeRoles, absent: true}}}
			return prefill.met(labels), decode.met(labels)
		}
	}
	all, names := []entry{}, map[string]bool{}
	for _, item := range v.at("endpoints").list() {
		name, address, labels := item.at("name").text(), item.at("address").text(), map[string]string{}
		port, err := strconv.ParseUint(item.at("port").text(), 10, 16)
		if at := item.at("labels"); at != nil {
			for key, label := range at.keys {
				labels[key] = label.text()
			}
		}
		prefill, decode := stages(labels)
		switch {
		case name == "" || names[name]:
			skipped = append(skipped, fmt.Sprintf("line %d: the name %q is empty or taken", item.node.Line, name))
		case net.ParseIP(address).To4() == nil || err != nil || port == 0:
			skipped = append(skipped, fmt.Sprintf("line %d: %s: %s:%s is no IPv4 address and port", item.node.Line,
				name, address, item.at("port").text()))
		case prefill || decode:
			e := entry{name, net.JoinHostPort(address, item.at("port").text()), "aggregated"}
			if !decode {
				e.Role = "prefill"
			} else if labels[roleLabel] == "decode" || !prefill && labels[roleLabel] != "" {
				e.Role = "decode"
			}
			names[name], all = true, append(all, e)
		}
	}
	file, err = yaml.Marshal(map[string][]entry{"endpoints": all})
	return file, skipped, err
}
