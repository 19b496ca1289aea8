package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/suggest"
)

const completionHelp = `kvepp completion prints a script that completes kvepp's commands, flags and their values in ` +
	`a shell.
The script for bash needs the package bash-completion.

Usage:       kvepp completion bash|zsh|fish
Example:     source <(kvepp completion bash)                                  this shell
             kvepp completion bash > /etc/bash_completion.d/kvepp             bash
             kvepp completion zsh > "${fpath[1]}/_kvepp"                      zsh
             kvepp completion fish > ~/.config/fish/completions/kvepp.fish    fish
`

// complete is `kvepp completion`. It returns the exit status.
func complete(root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	if slices.ContainsFunc(args, isHelp) {
		fmt.Fprint(stdout, completionHelp)
		return 0
	}
	var err error
	switch shell := strings.Join(args, " "); shell {
	case "bash":
		err = root.GenBashCompletionV2(stdout, true)
	case "zsh":
		err = root.GenZshCompletion(stdout)
	case "fish":
		err = root.GenFishCompletion(stdout, true)
	default:
		fmt.Fprintf(stderr, "kvepp completion %q: must be bash, zsh or fish%s\n"+
			"\"kvepp completion --help\" shows how to use it.\n",
			shell, suggest.DidYouMean(shell, "", []string{"bash", "fish", "zsh"}))
		return 2
	}
	if err != nil {
		return 1
	}
	return 0
}

// offer tells cobra what to offer for a command: its flags, except those that it only refuses or ignores, and their
// values.
func offer(to *cobra.Command, c command) {
	to.ValidArgsFunction = cobra.NoFileCompletions
	if c.name == "completion" {
		to.ValidArgs, to.ValidArgsFunction = []string{"bash", "fish", "zsh"}, nil
	}
	if c.flags == nil {
		return
	}
	c.flags().VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = flag.Hidden && flag.Name != flags.HelpAll
		values, kind := flags.ValuesOf(flag), cobra.ShellCompDirectiveNoFileComp
		switch flags.ValueWord(flag) {
		case "FILE":
			kind = cobra.ShellCompDirectiveDefault
		case "DIR", "FOLDER":
			kind = cobra.ShellCompDirectiveFilterDirs
		}
		flag.Usage = strings.Trim(flags.FirstSentence(flags.Meaning(flag)), ":")
		to.Flags().AddFlag(flag)
		// an error would say that the flag is unknown, or has a function already
		_ = to.RegisterFlagCompletionFunc(flag.Name, cobra.FixedCompletions(values, kind))
	})
}
