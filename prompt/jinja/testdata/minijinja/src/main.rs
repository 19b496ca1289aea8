//! Reads a JSON object per line ({"template", "messages", "variables"}) and answers each with a line {"text"} or {"error"}.

use dynamo_renderer::{ChatTemplate, ContextMixins, OAIChatLikeRequest, PromptFormatter};
use minijinja::value::Value;
use serde_json::json;
use std::{collections::HashMap, io::BufRead};

struct Request {
    messages: serde_json::Value,
    variables: HashMap<String, serde_json::Value>,
}

impl OAIChatLikeRequest for Request {
    fn model(&self) -> String {
        String::new()
    }
    fn messages(&self) -> Value {
        Value::from_serialize(&self.messages)
    }
    fn should_add_generation_prompt(&self) -> bool {
        true
    }
    fn chat_template_args(&self) -> Option<&HashMap<String, serde_json::Value>> {
        Some(&self.variables)
    }
}

fn render(line: &str) -> anyhow::Result<String> {
    let case: serde_json::Value = serde_json::from_str(line)?;
    let config: ChatTemplate = serde_json::from_value(json!({"chat_template": case["template"]}))?;
    let PromptFormatter::OAI(formatter) =
        PromptFormatter::from_parts(config, ContextMixins::new(&[]), true)?;
    formatter.render(&Request {
        messages: case["messages"].clone(),
        variables: serde_json::from_value(case["variables"].clone())?,
    })
}

fn main() {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        // The renderer panics at some templates.
        match std::panic::catch_unwind(|| render(&line)).unwrap_or_else(|_| Err(anyhow::anyhow!("panic"))) {
            Ok(text) => println!("{}", json!({"text": text})),
            Err(error) => println!("{}", json!({"error": format!("{error:#}")})),
        }
    }
}
