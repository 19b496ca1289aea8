package prompt

import (
	"slices"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// What SGLang does for MiniMax M3 before it renders the model's template.
// Source: SGLang 0.5.23, serving_chat, _normalize_minimax_m3_request and _sort_tool_message_run.

// m3Efforts are the reasoning efforts that the template gets.
var m3Efforts = []string{"low", "medium", "high", "xhigh", "max"}

// preparesM3 reports whether SGLang prepares the model's chats like this.
func (m *Model) preparesM3() bool {
	return m.modelType == "minimax_m3_vl" && m.release.rules.replacesTemplates
}

// m3Kwargs returns the template's variables, with thinking_mode by the request's thinking and effort. kwargs are those
// that other models get.
func (m *Model) m3Kwargs(request *body.Request, kwargs *values.Dict) (*values.Dict, error) {
	effort, err := m.release.rules.sglangRequestEffort(request)
	if err != nil {
		return nil, err
	}
	mode, decided := request.ChatTemplateKwargs.Get("thinking_mode")
	if thinking := field(request.Body, "thinking"); thinking != nil {
		if request.API == body.Messages {
			return nil, errNotReproduced("thinking that SGLang's --reasoning-parser decides,")
		}
		object, _ := thinking.(*values.Dict)
		kind, _ := get[string](object, "type")
		if !slices.Contains([]string{"adaptive", "enabled", "disabled"}, kind) {
			return nil, errRefused("thinking without the type adaptive, enabled or disabled")
		}
		if !decided {
			mode, decided = kind, true
		}
	}
	// decide decides the mode by the effort, if nothing else does, and what the effort becomes by that mode.
	decide := func() {
		if !decided && (effort == "none" || effort == "minimal") {
			mode, decided = "disabled", true
		}
		if name, _ := effort.(string); mode == "disabled" || !slices.Contains(m3Efforts, name) {
			effort = nil
		}
	}
	decide()
	if preset, given := m.defaultKwargs.Get("thinking_mode"); given && !decided {
		mode, decided = preset, true
	}
	if effort == nil {
		effort = field(m.defaultKwargs, "reasoning_effort")
	}
	decide()
	prepared := without(kwargs, "reasoning_effort", "thinking_mode")
	if decided {
		prepared.Set("thinking_mode", mode)
	}
	setFlag(prepared, "reasoning_effort", effort)
	return prepared, nil
}

// sortToolRuns puts the results of tools into the order of the calls that they answer, if each answers one and all ids
// are given and occur once.
func sortToolRuns(messages []any) {
	for i := 0; i < len(messages); i++ {
		assistant, _ := messages[i].(*values.Dict)
		calls, _ := get[*values.List](assistant, "tool_calls")
		if role(assistant) != "assistant" || calls.Len() == 0 {
			continue
		}
		end := i + 1
		for end < len(messages) && (role(messages[end]) == "tool" || role(messages[end]) == "function") {
			end++
		}
		run := messages[i+1 : end]
		i = end - 1
		order, responded := map[string]int{}, map[string]bool{}
		sortable := len(run) > 1
		for at, item := range calls.Items {
			call, _ := item.(*values.Dict)
			id, given := get[string](call, "id")
			_, twice := order[id]
			sortable = sortable && given && !twice
			order[id] = at
		}
		callOf := func(message any) string {
			d, _ := message.(*values.Dict)
			id, _ := get[string](d, "tool_call_id")
			return id
		}
		for _, message := range run {
			id := callOf(message)
			_, asked := order[id]
			sortable = sortable && asked && !responded[id]
			responded[id] = true
		}
		if sortable {
			slices.SortStableFunc(run, func(a, b any) int { return order[callOf(a)] - order[callOf(b)] })
		}
	}
}
