package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/suggest"
)

const completionHelp = `kvepp completion prints a script that completes kvepp's commands, flags and their values in ` +
	`a shell.

Usage:       kvepp completion bash|zsh|fish
Example:     source <(kvepp completion bash)                                  this shell
             kvepp completion bash > /etc/bash_completion.d/kvepp             bash
             kvepp completion zsh > "${fpath[1]}/_kvepp"                      zsh
             kvepp completion fish > ~/.config/fish/completions/kvepp.fish    fish
`

// shells are those for which there is a script.
var shells = []string{"bash", "fish", "zsh"}

// complete is `kvepp completion`. It returns the exit status.
func complete(args []string, stdout, stderr io.Writer) int {
	if slices.ContainsFunc(args, isHelp) {
		fmt.Fprint(stdout, completionHelp)
		return 0
	}
	name := strings.Join(args, " ")
	switch name {
	case "bash":
		completeBash(stdout)
		return 0
	case "zsh":
		completeZsh(stdout)
		return 0
	case "fish":
		completeFish(stdout)
		return 0
	}
	fmt.Fprintf(stderr, "kvepp completion %q: must be bash, zsh or fish%s\n"+
		"\"kvepp completion --help\" shows how to use it.\n",
		name, suggest.DidYouMean(name, "", shells))
	return 2
}

// A completion is a flag as scripts need it.
type completion struct {
	name, summary string
	word          string // for the value; "" for flags that are true or false
	values        []string
	kind          valueKind
}

// valueKind says what a shell offers for a value without a list of values.
type valueKind int

const (
	anyText valueKind = iota
	aFile
	aFolder
)

// completionsOf returns the flags that are offered for a command.
func completionsOf(c command) (all []completion) {
	if c.flags == nil {
		return nil
	}
	for _, s := range flags.Sections(c.flags()) {
		for _, flag := range s.Flags {
			all = append(all, completionOf(flag))
		}
	}
	all = append(all, completion{name: "help", summary: "show help"})
	if c.name == "serve" || c.name == "check" {
		all = append(all, completion{name: flags.HelpAll, summary: "show help with all flags"})
	}
	return all
}

func completionOf(flag *pflag.Flag) completion {
	c := completion{
		name:    flag.Name,
		summary: strings.Trim(flags.FirstSentence(flags.Meaning(flag)), ":"),
		values:  flags.ValuesOf(flag),
	}
	if flag.Value.Type() == "bool" {
		return c
	}
	switch c.word = flags.ValueWord(flag); c.word {
	case "FILE":
		c.kind = aFile
	case "DIR", "FOLDER":
		c.kind = aFolder
	}
	return c
}

// argumentsOf returns the words that a command takes besides flags.
func argumentsOf(command string) []string {
	if command == "completion" {
		return shells
	}
	return nil
}

// completeBash writes a script that needs no other package. Bash splits --flag=value into three words.
func completeBash(out io.Writer) {
	fmt.Fprintf(out, `# bash completion for kvepp; written by "kvepp completion bash"
_kvepp() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} flags= words= values=
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '%s' -- "$cur"))
    return
  fi
  if [[ $cur == "=" ]]; then
    cur=
  elif [[ $prev == "=" ]]; then
    prev=${COMP_WORDS[COMP_CWORD-2]}
  fi
  case ${COMP_WORDS[1]} in
`, strings.Join(commandNames(), " "))
	for _, c := range commands {
		completions, arguments := completionsOf(c), argumentsOf(c.name)
		if len(completions)+len(arguments) == 0 {
			continue
		}
		var names []string
		for _, f := range completions {
			names = append(names, "--"+f.name)
		}
		fmt.Fprintf(out, "  %s)\n    flags='%s'\n    words='%s'\n    case $prev in\n", c.name,
			strings.Join(names, " "), strings.Join(arguments, " "))
		var files, folders, others []string
		for _, f := range completions {
			name := "--" + f.name
			switch {
			case len(f.values) > 0:
				fmt.Fprintf(out, "    %s) values='%s' ;;\n", name, strings.Join(f.values, " "))
			case f.kind == aFile:
				files = append(files, name)
			case f.kind == aFolder:
				folders = append(folders, name)
			case f.word != "":
				others = append(others, name)
			}
		}
		for _, group := range []struct {
			names []string
			do    string
		}{
			{files, `compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur")); return`},
			{folders, `compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$cur")); return`},
			{others, "return"},
		} {
			if len(group.names) > 0 {
				fmt.Fprintf(out, "    %s) %s ;;\n", strings.Join(group.names, "|"), group.do)
			}
		}
		fmt.Fprint(out, "    esac ;;\n")
	}
	fmt.Fprint(out, `  esac
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  else
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  fi
}
complete -F _kvepp kvepp
`)
}

// completeZsh writes a script for zsh's _arguments, to be sourced or to be found in fpath.
func completeZsh(out io.Writer) {
	escape := strings.NewReplacer(`'`, `'\''`, `[`, `\[`, `]`, `\]`, `:`, `\:`)
	fmt.Fprint(out, "#compdef kvepp\n# zsh completion for kvepp; written by \"kvepp completion zsh\"\n\n_kvepp() {\n"+
		"  local -a commands\n  commands=(\n")
	for _, c := range commands {
		fmt.Fprintf(out, "    '%s:%s'\n", c.name, escape.Replace(c.summary))
	}
	fmt.Fprint(out, "  )\n  if ((CURRENT == 2)); then\n    _describe command commands\n    return\n  fi\n"+
		"  local command=$words[2]\n  shift words\n  ((CURRENT--))\n  case $command in\n")
	for _, c := range commands {
		completions, arguments := completionsOf(c), argumentsOf(c.name)
		if len(completions)+len(arguments) == 0 {
			continue
		}
		fmt.Fprintf(out, "  %s)\n    _arguments", c.name)
		for _, f := range completions {
			equals, action := "=", ""
			switch {
			case len(f.values) > 0:
				action = ":" + escape.Replace(f.word) + ":(" + strings.ReplaceAll(strings.Join(f.values, " "), ":",
					`\:`) + ")"
			case f.kind == aFile:
				action = ":file:_files"
			case f.kind == aFolder:
				action = ":folder:_files -/"
			case f.word != "":
				action = ":" + escape.Replace(f.word) + ":"
			default:
				equals = ""
			}
			fmt.Fprintf(out, " \\\n      '*--%s%s[%s]%s'", f.name, equals, escape.Replace(f.summary), action)
		}
		if len(arguments) > 0 {
			fmt.Fprintf(out, " \\\n      '1:argument:(%s)'", strings.Join(arguments, " "))
		}
		fmt.Fprint(out, " ;;\n")
	}
	fmt.Fprint(out, "  esac\n}\n\nif [[ $funcstack[1] == _kvepp ]]; then\n  _kvepp \"$@\"\nelse\n  compdef _kvepp "+
		"kvepp\nfi\n")
}

// completeFish writes a script of complete commands.
func completeFish(out io.Writer) {
	quote := func(s string) string {
		return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
	}
	fmt.Fprint(out, "# fish completion for kvepp; written by \"kvepp completion fish\"\ncomplete -c kvepp -f\n")
	for _, c := range commands {
		fmt.Fprintf(out, "complete -c kvepp -n __fish_use_subcommand -a %s -d %s\n", c.name, quote(c.summary))
	}
	for _, c := range commands {
		only := "complete -c kvepp -n '__fish_seen_subcommand_from " + c.name + "'"
		for _, f := range completionsOf(c) {
			fmt.Fprintf(out, "%s -l %s -d %s", only, f.name, quote(f.summary))
			switch {
			case len(f.values) > 0:
				fmt.Fprintf(out, " -x -a %s", quote(strings.Join(f.values, " ")))
			case f.kind == aFile:
				fmt.Fprint(out, " -r -F")
			case f.kind == aFolder:
				fmt.Fprint(out, " -x -a '(__fish_complete_directories)'")
			case f.word != "":
				fmt.Fprint(out, " -x")
			}
			fmt.Fprintln(out)
		}
		if arguments := argumentsOf(c.name); len(arguments) > 0 {
			fmt.Fprintf(out, "%s -a %s\n", only, quote(strings.Join(arguments, " ")))
		}
	}
}
