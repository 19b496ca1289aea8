package prompt

import (
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// The variables by which templates turn thinking on and off.
const (
	thinking       = "thinking"
	enableThinking = "enable_thinking"
	thinkingMode   = "thinking_mode"
)

// dynamoKwargs returns the client's variables. Whether to think is set under every name that templates read.
func dynamoKwargs(request *body.Request, settings *DynamoSettings) (*values.Dict, error) {
	kwargs := values.NewDict()
	if request.ChatTemplateKwargs != nil {
		kwargs = request.ChatTemplateKwargs.Clone()
	}
	if _, ok := kwargs.Get("chat_template"); ok {
		return nil, refused("a chat_template among the template's arguments")
	}
	if err := values.CheckRustNumbers(kwargs); err != nil {
		return nil, err
	}
	if request.API != body.Messages {
		if err := resolveThinking(request, kwargs); err != nil {
			return nil, err
		}
	}
	settings.defaultThinking(request, kwargs)
	decided, err := sameThinking(kwargs)
	if err == nil {
		settings.applyParsers(request, kwargs, decided)
	}
	return kwargs, err
}

// sameThinking finds the variable that decides whether to think, and sets both boolean variables to its value. decided
// reports whether there is one.
func sameThinking(kwargs *values.Dict) (decided bool, err error) {
	for _, name := range []string{thinking, enableThinking, thinkingMode} {
		v, _ := kwargs.Get(name)
		switch v := v.(type) {
		case bool:
			if name == enableThinking || name == thinking {
				kwargs.Set(thinking, v)
				kwargs.Set(enableThinking, v)
				return true, nil
			}
		case nil:
			continue
		case string:
			switch mode := strings.ToLower(v); {
			case name != thinkingMode:
			case mode == "enabled" || mode == "disabled":
				kwargs.Set(thinking, mode == "enabled")
				kwargs.Set(enableThinking, mode == "enabled")
				return true, nil
			case mode == "adaptive" || mode == "chat" || mode == "thinking":
				return false, nil
			}
		}
		return false, errNotReproduced(fmt.Sprintf("%s of %v", name, v))
	}
	return false, nil
}

// resolveThinking sets the variables that turn thinking on or off, by the first of these that the request has:
// thinking, the template's variables, reasoning_effort.
func resolveThinking(request *body.Request, kwargs *values.Dict) error {
	effort, _ := kwargs.Get("reasoning_effort")
	if request.ReasoningEffort != "" {
		if !slices.Contains(reasoningEfforts, request.ReasoningEffort) {
			return refused("this reasoning_effort")
		}
		effort = request.ReasoningEffort
	}
	set := func(on bool) {
		kwargs.Set(thinking, on)
		kwargs.Set(enableThinking, on)
		mode := "disabled"
		if on {
			mode = "enabled"
		}
		kwargs.Set(thinkingMode, mode)
	}
	controlled := effort != nil || request.Thinking != nil
	for _, name := range []string{thinking, enableThinking, thinkingMode} {
		_, given := kwargs.Get(name)
		controlled = controlled || given
	}
	if !controlled {
		return nil
	}
	wish := request.Thinking
	if object, ok := wish.(*values.Dict); ok {
		wish, _ = object.Get("type")
	}
	switch wish {
	case nil:
	case true, "enabled":
		set(true)
	case false, "disabled":
		set(false)
	default:
		return errNotReproduced("this 'thinking'")
	}
	decided := false
	for _, name := range []string{thinking, enableThinking} {
		if on, ok := get[bool](kwargs, name); ok && !decided {
			set(on)
			decided = true
		}
	}
	mode, _ := get[string](kwargs, thinkingMode)
	switch mode = strings.ToLower(mode); {
	case decided || mode == "adaptive":
	case mode == "enabled" || mode == "disabled":
		set(mode == "enabled")
	default:
		if grade, ok := effort.(string); ok {
			set(grade != "none")
		}
	}
	if effort != nil {
		kwargs.Set("reasoning_effort", effort)
	}
	return nil
}
