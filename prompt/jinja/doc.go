// Package jinja renders a chat request into prompt text with the model's own Jinja template.
//
// It owns a Jinja engine with Python's semantics over the values of prompt/values: chat templates depend on how Python
// prints None and True, compares 1 with 1.0, and defines white space. The reference is Jinja2 as Hugging Face
// Transformers configures it: the immutable sandbox, trim_blocks, lstrip_blocks, break and continue, the generation
// tag, and Transformers' own tojson, dict, namespace, raise_exception and strftime_now. If it cannot render something
// as Jinja2 does, it returns an error. The dialect MiniJinja is the same engine with the differences of minijinja as
// Dynamo's frontend uses it; see Dialect.
//
// It never reads files or the network, never runs code other than the template, and never trusts its input: clients
// choose tools and messages, so every render is bounded in steps, depth, bytes, memory and time (Limits), and ends with
// its context. Work and memory are counted before they are spent. A test runs each filter, test, method, function and
// operator on values of hostile sizes and compares the cost with the count.
//
// A Template is immutable and safe for concurrent use.
package jinja
