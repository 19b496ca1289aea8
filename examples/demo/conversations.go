package main

import (
	"fmt"
	"strings"
)

// systems are the system prompts that conversations share.
var systems = []string{
	"You are the assistant of a travel agency. " + rules(
		[]string{"Lisbon", "Porto"},
		"For journeys from %s, answer in the language of the question, in short sentences, and never invent a "+
			"timetable or a price.",
		"When somebody in %s asks for a connection, give the departure, the changes and the arrival, each on a line "+
			"of its own.",
		"From %s, trains come before buses, and buses before flights, unless the journey takes longer than a day.",
		"Children under six travel free of charge with an adult; from six to fourteen they pay half of the price.",
		"If you are not certain, say that you will ask a colleague in %s, and name the hours in which the office is "+
			"open.",
	),
	"You review the source code of a team that writes network services. " + rules(
		[]string{"the parser", "the scheduler"},
		"In %s, look first for mistakes that lose data, then for those that stop a service, then for everything else.",
		"Quote the line of %s that you speak of, say what happens there and when, and propose the smallest change "+
			"that mends it.",
		"Memory of %s that a client can make grow has a limit, a counter, and a rule for what happens at the limit.",
		"Locks protect data, not code: name what each of them guards, and hold none while calling somebody else.",
		"Names say what a thing is for a reader who sees it for the first time; comments say why it is so.",
	),
}

// rules returns every sentence for every subject.
func rules(subjects []string, sentences ...string) string {
	var b strings.Builder
	for _, subject := range subjects {
		for _, sentence := range sentences {
			b.WriteString(strings.ReplaceAll(sentence, "%s", subject) + " ")
		}
	}
	return b.String()
}

var topics = []string{
	"the way from Lisbon to Porto",
	"a buffer that is read twice",
	"a weekend in the mountains",
	"a retry without a limit",
	"night trains to the north",
	"a map written by two goroutines",
	"the cheapest ferry",
	"a timeout that never fires",
}

// question returns the question of a conversation's turn, always the same, so that runs are comparable. The first
// question contains a document of about 2,000 tokens, which all later turns repeat.
func question(run string, conversation, turn int) string {
	topic := topics[conversation%len(topics)]
	if turn > 0 {
		return fmt.Sprintf(
			"This is question %d about %s. Please explain what matters there, what people usually overlook, and what "+
				"you would do first.",
			turn+1,
			topic,
		)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Here are my notes (%s) about %s.\n", run, topic)
	for i := range 60 {
		fmt.Fprintf(
			&b,
			"%d. On day %d of looking into %s we saw %d cases, and %d of them needed somebody to look twice before "+
				"it was clear.\n",
			i+1,
			3*i+conversation,
			topic,
			(i*37+conversation*11)%97,
			(i*13+conversation*7)%29,
		)
	}
	b.WriteString("What should I read first?")
	return b.String()
}
