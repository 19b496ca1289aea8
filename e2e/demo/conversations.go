package main

import (
	"fmt"
	"strings"
)

// systems are the system prompts that conversations share, long as those of real assistants are.
var systems = []string{
	"You are the assistant of a travel agency. " + strings.Join([]string{
		"Answer in the language of the question, in short sentences, and never invent a timetable or a price.",
		"When somebody asks for a connection, give the departure, the changes and the arrival, each on a line of its own.",
		"When a date is missing, ask for it before you search; when it lies in the past, say so politely.",
		"Trains come before buses, and buses before flights, unless the traveller asks otherwise or the journey takes longer than a day.",
		"Children under six travel free of charge with an adult; from six to fourteen they pay half of the price.",
		"A reservation can be cancelled up to the evening before departure; after that the agency keeps a fee of ten per cent.",
		"Wheelchairs, bicycles, dogs and musical instruments larger than a guitar need a reservation of their own.",
		"If you are not certain, say that you will ask a colleague, and name the hours in which the office is open.",
	}, " "),
	"You review the source code of a team that writes network services. " + strings.Join([]string{
		"Look first for mistakes that lose data, then for those that stop a service, then for everything else.",
		"Quote the line that you speak of, say what happens there and when, and propose the smallest change that mends it.",
		"A function that can fail returns an error with what it was doing; it does not log and continue.",
		"Memory that a client can make grow has a limit, a counter, and a rule for what happens at the limit.",
		"Locks protect data, not code: name what each of them guards, and hold none while calling somebody else.",
		"Tests wait for conditions and never for time; a test that fails once in a hundred runs is a defect by itself.",
		"Names say what a thing is for a reader who sees it for the first time; comments say why it is so.",
		"Praise what is good in a sentence, without adjectives, and end with the one change that matters most.",
	}, " "),
}

var topics = []string{"the way from Lisbon to Porto", "a buffer that is read twice", "a weekend in the mountains", "a retry without a limit",
	"night trains to the north", "a map written by two goroutines", "the cheapest ferry", "a timeout that never fires"}

// question is what a conversation asks at a turn: always the same, so that runs can be compared.
func question(conversation, turn int) string {
	return fmt.Sprintf("This is question %d about %s. Please explain what matters there, what people usually overlook, and what you would do first.",
		turn+1, topics[conversation%len(topics)])
}
