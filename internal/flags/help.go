package flags

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// width is the number of columns of help, and column the one at which the text of a flag begins.
const (
	width  = 100
	column = 30
)

// A Group is a section and its flags.
type Group struct {
	Title string
	Flags []*pflag.Flag
}

// Sections returns the flags of a command that are not hidden, in the order of their declaration.
func Sections(fs *pflag.FlagSet) (sections []Group) {
	fs.VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden {
			return
		}
		title := SectionOf(flag)
		at := slices.IndexFunc(sections, func(s Group) bool { return s.Title == title })
		if at < 0 {
			at, sections = len(sections), append(sections, Group{Title: title})
		}
		sections[at].Flags = append(sections[at].Flags, flag)
	})
	return sections
}

// WriteHelp writes a section: each flag with its meaning, default and inherited variable.
func (s Group) WriteHelp(out io.Writer) {
	fmt.Fprintf(out, "\n%s\n", s.Title)
	for _, flag := range s.Flags {
		text := Meaning(flag) + shownDefault(flag)
		if variables := VariablesOf(flag); len(variables) > inheritedVariable {
			text += " [" + variables[inheritedVariable] + "]"
		}
		write(out, flag, text)
	}
}

// WriteBrief writes a section with the first sentence of each flag.
func (s Group) WriteBrief(out io.Writer) {
	fmt.Fprintf(out, "\n%s\n", s.Title)
	for _, flag := range s.Flags {
		write(out, flag, FirstSentence(Meaning(flag))+shownDefault(flag))
	}
}

// Lines returns the flags that are not hidden, each on a line with its meaning and default.
func Lines(fs *pflag.FlagSet) string {
	var lines []string
	for _, section := range Sections(fs) {
		for _, flag := range section.Flags {
			lines = append(lines, Spelled(flag)+": "+Meaning(flag)+shownDefault(flag))
		}
	}
	return strings.Join(lines, "\n")
}

// write writes a flag with its text beside it, or below it if its name is long.
func write(out io.Writer, flag *pflag.Flag, text string) {
	head := "  " + Spelled(flag)
	if len(head) > column-2 {
		fmt.Fprintln(out, head)
		head = ""
	}
	for _, line := range wrap(text, width-column) {
		fmt.Fprintf(out, "%-*s%s\n", column, head, line)
		head = ""
	}
}

// Spelled returns a flag as it is written, with a word for its value: --grpc-port PORT.
func Spelled(flag *pflag.Flag) string {
	if word := ValueWord(flag); word != "" {
		return "--" + flag.Name + " " + word
	}
	return "--" + flag.Name
}

// ValueWord returns the word for a flag's value; "" for a flag that is true or false.
func ValueWord(flag *pflag.Flag) string {
	word, _ := pflag.UnquoteUsage(flag)
	switch word {
	case "int", "uint", "uint16", "float":
		return "NUMBER"
	case "string":
		return "TEXT"
	}
	if strings.Contains(word, ":") {
		return word
	}
	return strings.ToUpper(word)
}

// Meaning returns the help of a flag.
func Meaning(flag *pflag.Flag) string {
	_, usage := pflag.UnquoteUsage(flag)
	return usage
}

// FirstSentence returns a text up to the end of its first sentence, without the period.
func FirstSentence(text string) string {
	first, _, _ := strings.Cut(text, ". ")
	return first
}

// shownDefault returns the default of a flag as help shows it, in brackets; "" where the help says what an absent value
// means.
func shownDefault(flag *pflag.Flag) string {
	if value := Default(flag); !slices.Contains([]string{"", "0", "false", "0s"}, value) {
		return " (default " + value + ")"
	}
	return ""
}

// Default returns the default of a flag; "" if it has none.
func Default(flag *pflag.Flag) string {
	switch {
	case flag.DefValue == "[]" || flag.DefValue == "NaN":
		return ""
	case flag.Value.Type() == "duration":
		return shortDuration(flag.DefValue)
	}
	return flag.DefValue
}

// shortDuration returns a duration as people write it: Go prints 5m as 5m0s.
func shortDuration(d string) string {
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(d, zero) {
			d = d[:len(d)-2]
		}
	}
	return d
}

// wrap breaks the lines of a text into lines of at most max columns, between words.
func wrap(text string, max int) (lines []string) {
	for paragraph := range strings.SplitSeq(text, "\n") {
		line := ""
		for _, word := range strings.Fields(paragraph) {
			switch {
			case line == "":
				line = word
			case len(line)+1+len(word) <= max:
				line += " " + word
			default:
				lines, line = append(lines, line), word
			}
		}
		lines = append(lines, line)
	}
	return lines
}
