// Package chattemplate turns a chat request into the prompt text that the model's own Jinja template makes of it.
//
// It owns a JSON reader, the values that reader produces, and a Jinja engine with Python's semantics, because a chat
// template is Python in disguise: it prints None and True, compares 1 with 1.0, and strips what Python calls white
// space. The reference is Jinja2 as Hugging Face Transformers runs it: the immutable sandbox, trim_blocks,
// lstrip_blocks, break and continue, the generation tag, and Transformers' own tojson, dict, namespace, raise_exception
// and strftime_now. What it cannot render as Jinja2 does, it refuses with an error. The dialect MiniJinja is the same
// engine with the differences that minijinja, as Dynamo's frontend runs it, has from that; see Dialect.
//
// It never reads files or the network, never runs anything but the template, and never trusts the values it is given: a
// client chooses tools and messages, so every render is bounded in steps, depth, bytes, memory and time (Limits), and
// ends with its context. What costs work or memory counts it before it is done; a test runs each filter, test, method,
// function and operator on values of hostile sizes and holds what it takes against what it counts.
//
// A Template is immutable and safe for concurrent use. Lists and dicts are not: nobody may change one while another
// goroutine reads it.
package chattemplate
