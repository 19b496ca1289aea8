package llmd

import (
	"fmt"
	"net"
	"strconv"

	"go.yaml.in/yaml/v3"

	"kvepp/pool"
)

const endpointsShape = "{endpoints: [{name, namespace, address, port, labels: texts}]}"

// Endpoints translates a file of llm-d's file-discovery into kvepp's endpoints file. of is [Settings.RoleOf];
// nil: the label llm-d.ai/role says it. skipped names the entries that cannot be used. An error is about the whole
// file.
func Endpoints(text []byte, of func(map[string]string) (pool.Role, bool)) (file []byte, skipped []string, err error) {
	root, err := parse(string(text))
	if err != nil || root == nil {
		return []byte("endpoints: []\n"), nil, err
	}
	v, err := (&reader{left: maxValues}).read(root, shapeOf(endpointsShape), "", 0)
	if err != nil {
		return nil, nil, err
	}
	if of == nil {
		of = roleOf(prefills(true), decodes(true))
	}
	type entry struct{ Name, Address, Role string } // of kvepp's file
	all, names := []entry{}, map[string]bool{}
	for _, item := range v.at("endpoints").list() {
		name, address, labels := item.at("name").text(), item.at("address").text(), map[string]string{}
		port, err := strconv.ParseUint(item.at("port").text(), 10, 16)
		for key, label := range item.at("labels").keys() {
			labels[key] = label.text()
		}
		role, takes := of(labels)
		switch {
		case name == "" || names[name]:
			skipped = append(skipped, fmt.Sprintf("line %d: the name %q is empty or taken", item.Line, name))
		case net.ParseIP(address).To4() == nil || err != nil || port == 0:
			skipped = append(skipped, fmt.Sprintf("line %d: %s: %s:%s is no IPv4 address and port", item.Line,
				name, address, item.at("port").text()))
		case takes:
			names[name] = true
			all = append(all, entry{name, net.JoinHostPort(address, item.at("port").text()), string(role)})
		}
	}
	file, err = yaml.Marshal(map[string][]entry{"endpoints": all})
	return file, skipped, err
}
