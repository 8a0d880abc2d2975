//! Plans as bodies: what a seed fixes, what is shared, what a chat of the API looks like, and how many tokens it has.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::*;
use crate::plan::{Images, Shape};
use crate::prompt::TextModel;
use crate::run::recording::CHAT_PATH;

fn shared(seed: u64) -> Workload {
    Workload::generated(Recipe::shared_prefix(5, 1.0, 30, 10, 8), 200, "m", seed)
}

fn chats(seed: u64, scripted_answers: bool) -> Workload {
    let recipe = Recipe { turns: 4.0, ..Recipe::shared_prefix(2, 0.0, 20, 10, 8) };
    Workload { scripted_answers, ..Workload::generated(recipe, 10, "m", seed) }
}

fn prepared(workload: &Workload, answer: &str) -> Vec<Prepared> {
    let plan = workload.plan();
    let mut all = Vec::new();
    for number in 0..plan.sessions() {
        let mut script = plan.script(number);
        while let Some(request) = plan.next(&mut script, Some(answer)) {
            all.push(request);
        }
    }
    assert_eq!((all.len(), plan.requests()), (workload.requests, workload.requests));
    assert!(all.iter().enumerate().all(|(place, request)| request.index == place));
    all
}

fn bodies(workload: &Workload, answer: &str) -> Vec<Value> {
    let parse = |request: Prepared| serde_json::from_str(&request.body).expect("a body is JSON");
    prepared(workload, answer).into_iter().map(parse).collect()
}

#[test]
fn equal_seeds_give_equal_bodies() {
    let agents = |seed| Workload::generated(Shape::Agents.recipe(), 60, "m", seed);
    for make in [shared as fn(u64) -> Workload, |seed| chats(seed, true), |seed| chats(seed, false), agents] {
        assert_eq!(prepared(&make(3), "a"), prepared(&make(3), "a"));
        assert_ne!(prepared(&make(3), "a"), prepared(&make(4), "a"));
    }
    assert_eq!(bodies(&chats(3, true), "a"), bodies(&chats(3, true), "b"), "scripted answers ignore the server");
    assert_ne!(bodies(&chats(3, false), "a"), bodies(&chats(3, false), "b"));
}

#[test]
fn prefixes_are_shared_and_questions_unique() {
    let all = bodies(&shared(9), "");
    let mut counts = HashMap::<String, usize>::new();
    all.iter().for_each(|body| *counts.entry(body["messages"][0]["content"].to_string()).or_default() += 1);
    assert_eq!(counts.len(), 5);
    let (most, least) = (counts.values().max().unwrap(), counts.values().min().unwrap());
    assert!(most > &(2 * least), "Zipf: {counts:?}");
    let questions: HashSet<String> = all.iter().map(|body| body["messages"][1]["content"].to_string()).collect();
    assert_eq!(questions.len(), all.len());
}

#[test]
fn turns_grow_the_same_conversation_and_quote_the_server() {
    let all = bodies(&chats(5, false), "say \"yes\"\n");
    let (first, second) = (all[0]["messages"].as_array().unwrap(), all[1]["messages"].as_array().unwrap());
    assert_eq!(second[..first.len()], first[..]);
    assert_eq!(second[first.len()], json!({"role": "assistant", "content": "say \"yes\"\n"}));
    assert_eq!((second.len(), &second[first.len() + 1]["role"]), (first.len() + 2, &json!("user")));
    assert_eq!(all[0]["stream_options"], json!({"include_usage": true}));
    let wants: Vec<bool> = prepared(&chats(5, false), "").iter().map(|it| it.wants_text).collect();
    assert_eq!(wants[..4], [true, true, true, false], "the last answer of a conversation is nobody's history");
    // A turn whose answer failed goes on with the plan's own words, as a scripted one would.
    let (quoting, scripted) = (chats(5, false).plan(), chats(5, true).plan());
    let second = |plan: &Plan| {
        let mut script = plan.script(0);
        plan.next(&mut script, None);
        plan.next(&mut script, None).unwrap().body
    };
    assert_eq!(second(&quoting), second(&scripted));
}

#[test]
fn agents_call_tools_and_get_results() {
    let all = bodies(&Workload::generated(Shape::Agents.recipe(), 40, "m", 2), "thinking");
    let (first, second) = (&all[0], &all[1]);
    let tools = first["tools"].as_array().unwrap();
    assert_eq!(second["tools"], first["tools"]);
    let messages = second["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|it| it["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool"]);
    let call = &messages[2]["tool_calls"][0];
    assert_eq!((&call["id"], &messages[2]["content"]), (&messages[3]["tool_call_id"], &json!("thinking")));
    assert!(tools.iter().any(|tool| tool["function"]["name"] == call["function"]["name"]));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["query"].as_str().unwrap().contains(' '));
}

#[test]
fn a_text_grows_by_lines_and_by_the_answer_as_it_was_given() {
    let text = |endpoint, answer: &str| -> Vec<String> {
        let workload = Workload { endpoint, ..Workload::generated(Shape::Agents.recipe(), 40, "m", 2) };
        assert!(prepared(&workload, answer).iter().all(|request| &*request.path == endpoint.path()));
        let member = if endpoint == Endpoint::Completions { "prompt" } else { "input" };
        let all = bodies(&workload, answer);
        assert_eq!(all[0].get("max_tokens").is_some(), endpoint.generates(), "{}", all[0]);
        all.iter().map(|body| body[member].as_str().unwrap().to_owned()).collect()
    };
    let (answered, embedded) = (text(Endpoint::Completions, "say \"yes\"\tnow"), text(Endpoint::Embeddings, "unused"));
    let added = answered[1].strip_prefix(&*answered[0]).unwrap();
    let (answer, result) = added.strip_suffix('\n').unwrap().split_once('\n').unwrap();
    assert_eq!(answer, "say \"yes\"\tnow");
    assert_eq!(embedded[1], format!("{}{result}\n", embedded[0]), "the same texts, and no answer between");
    assert!(embedded[0] == answered[0] && result.split(' ').count() > 100, "{result}");
}

#[test]
fn responses_and_messages_have_their_own_members_and_no_tools() {
    let agents = |endpoint| {
        let workload = Workload { endpoint, ..Workload::generated(Shape::Agents.recipe(), 40, "m", 2) };
        assert!(prepared(&workload, "").iter().all(|request| &*request.path == endpoint.path()));
        bodies(&workload, "thinking").swap_remove(1)
    };
    let roles = |messages: &Value| -> Vec<String> {
        messages.as_array().unwrap().iter().map(|it| it["role"].as_str().unwrap().to_owned()).collect()
    };
    let (responses, messages) = (agents(Endpoint::Responses), agents(Endpoint::Messages));
    assert_eq!(roles(&responses["input"]), ["system", "user", "assistant", "user"]);
    assert_eq!(roles(&messages["messages"]), ["user", "assistant", "user"]);
    assert_eq!(messages["messages"][1], json!({"role": "assistant", "content": "thinking"}));
    assert_eq!(messages["system"], responses["input"][0]["content"]);
    assert_eq!(messages["max_tokens"], responses["max_output_tokens"]);
    for body in [&responses, &messages] {
        assert!(body["stream"] == true && body.get("tools").or(body.get("stream_options")).is_none(), "{body}");
    }
}

#[test]
fn the_next_text_begins_with_the_tokens_that_the_engine_has() {
    let model = TextModel::shipped().unwrap();
    let plan = Workload { endpoint: Endpoint::Completions, ..chats(5, false) }.plan();
    let text = |request: Prepared| {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        model.encode(body["prompt"].as_str().unwrap()).unwrap()
    };
    let mut script = plan.script(0);
    let mut cached = text(plan.next(&mut script, None).unwrap());
    let (answer, words): (Vec<u32>, Vec<&str>) = model.answer(&cached, 0, 30).into_iter().unzip();
    cached.extend(answer);
    let next = text(plan.next(&mut script, Some(&words.concat())).unwrap());
    assert_eq!(next[..cached.len()], cached[..]);
}

#[test]
fn lengths_are_those_of_the_plan_in_the_shipped_tokenizer() {
    let text = TextModel::shipped().unwrap();
    for shape in [Shape::SharedPrompts, Shape::Rag, Shape::Chat, Shape::Agents, Shape::OnePrompt, Shape::Unique] {
        let workload = Workload { scripted_answers: true, ..Workload::generated(shape.recipe(), 6, "m", 4) };
        let Kept::Drawn { sessions, .. } = workload.plan().sessions else { panic!("generated sessions are drawn") };
        let mut planned = Vec::new();
        for session in &sessions {
            let mut tokens = 0;
            for turn in &session.turns {
                tokens += turn.pieces.iter().map(|piece| piece.tokens).sum::<usize>();
                planned.push(tokens);
                tokens += turn.answer_tokens;
            }
        }
        for (body, planned) in bodies(&workload, "").iter().zip(planned) {
            let found = text.chat(body).unwrap().1.len();
            let allowed = planned * 102 / 100 + 20 + 40 * body["messages"].as_array().unwrap().len();
            assert!((planned * 97 / 100..=allowed).contains(&found), "{shape:?}: {found} tokens for {planned}");
        }
    }
}

#[test]
fn pictures_are_data_and_repeat() {
    let images = Images { count: 3, bytes: 400, new_share: 0.0 };
    let recipe = Recipe { images: Some(images), ..Recipe::plain("images", 10.0, 4.0) };
    let all = bodies(&Workload::generated(recipe, 9, "m", 4), "");
    let mut counts = HashMap::<String, usize>::new();
    for body in &all {
        let content = &body["messages"][0]["content"];
        assert_eq!((&content[0]["type"], &content[1]["type"]), (&json!("image_url"), &json!("text")));
        *counts.entry(content[0]["image_url"]["url"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    assert_eq!(counts.values().collect::<Vec<_>>(), [&3, &3, &3]);
    assert!(counts.keys().all(|it| it.starts_with("data:image/png;base64,") && it.len() == 422));
}

#[test]
fn a_trace_is_sent_with_its_own_lengths_and_shared_beginnings() {
    let lines = Arc::new(crate::plan::trace::tests::lines());
    let source = Source::Trace { file: "t".into(), lines };
    let workload = Workload { source, requests: 3, ..shared(1) };
    let contents: Vec<String> =
        bodies(&workload, "").iter().map(|it| it["messages"][0]["content"].as_str().unwrap().to_owned()).collect();
    let words = |number: usize| contents[number].split(' ').collect::<Vec<_>>();
    assert_eq!([words(0).len(), words(1).len(), words(2).len()], [1300, 1000, 2048]);
    let shared = |left: usize, right: usize| words(left).iter().zip(words(right)).take_while(|(l, r)| *l == r).count();
    assert!((512..520).contains(&shared(0, 1)) && (1024..1030).contains(&shared(0, 2)));
    let prepared = prepared(&workload, "");
    assert_eq!(prepared.iter().map(|it| it.answer_tokens).collect::<Vec<_>>(), [10, 1, 600]);
    let times = workload.plan().recorded_times().unwrap();
    assert!(times.is_sorted() && times[2] >= 6_000_000_000, "{times:?}");
}

#[test]
fn a_recording_is_sent_as_its_own_bytes() {
    let text = "{\"time\":5,\"body\":{\"b\" : 1}}\n{\"time\":6.5,\"body\":{},\"path\":\"/v1/embeddings\"}\n";
    let requests = Arc::new(crate::run::recording::read_recording(text.as_bytes(), 9).unwrap());
    let workload = Workload { source: Source::Recording { file: "r".into(), requests }, requests: 2, ..shared(1) };
    let sent: Vec<(String, String)> =
        prepared(&workload, "").into_iter().map(|it| (it.path.to_string(), it.body)).collect();
    assert_eq!(sent[0], (CHAT_PATH.to_owned(), "{\"b\" : 1}".to_owned()));
    assert_eq!(sent[1], ("/v1/embeddings".to_owned(), "{}".to_owned()));
    assert_eq!(workload.plan().recorded_times(), Some(vec![0, 1_500_000_000]));
}
