//! Answers of engines as tables.

use super::*;

fn facts(read: impl FnOnce(&mut Facts) -> Result<(), String>) -> Result<Facts, String> {
    let mut facts = Facts::default();
    read(&mut facts).map(|()| facts)
}

#[test]
fn models() {
    for (body, model, engine) in [
        (
            r#"{"object":"list","data":[{"id":"Qwen/Qwen3-8B","owned_by":"vllm","root":"x","parent":null,"max_model_len":40960}]}"#,
            "Qwen/Qwen3-8B",
            Some("vllm"),
        ),
        (r#"{"data":[{"id":"m","owned_by":"sglang"}]}"#, "m", Some("sglang")),
        (r#"{"data":[{"id":"m"}]}"#, "m", None),
        // Adapters come with their parent's name, in any order.
        (
            r#"{"data":[{"id":"lora","owned_by":"vllm","parent":"m"},{"id":"m","owned_by":"vllm","parent":null}]}"#,
            "m",
            Some("vllm"),
        ),
        // Two served names: the first, which the engine puts into its answers.
        (r#"{"data":[{"id":"a","owned_by":"vllm"},{"id":"b","owned_by":"vllm"}]}"#, "a", Some("vllm")),
        (r#"{"data":[{"id":""},{"object":"model"},{"id":"m"}]}"#, "m", None),
    ] {
        let facts = facts(|facts| facts.read_models(body.as_bytes())).unwrap_or_else(|error| panic!("{body}: {error}"));
        assert_eq!((facts.model_name.as_deref(), facts.engine), (Some(model), engine), "{body}");
    }
    for (body, expected) in [
        ("", "not JSON"),
        ("<html>", "not JSON"),
        ("[]", "no `data` array"),
        (r#"{"data":{}}"#, "no `data` array"),
        (r#"{"data":[]}"#, "no model in it yet"),
        (r#"{"data":[{"id":null},7]}"#, "no model in it yet"),
    ] {
        let error = facts(|facts| facts.read_models(body.as_bytes())).expect_err(body);
        assert!(error.contains(expected), "{body}: {error}");
    }
}

#[test]
fn b45_every_served_name_counts_but_an_adapters() {
    let body = r#"{"data":[{"id":"lora","parent":"a"},{"id":"a"},{"id":"b","parent":null},{"id":"a"},{"id":"b"},{"id":""},{"id":"c"}]}"#;
    let said = facts(|facts| facts.read_models(body.as_bytes())).unwrap();
    assert_eq!((said.model_name.as_deref(), said.further_model_names.join(",").as_str()), (Some("a"), "b,c"));
    let open = WorkerRecord::new("w:1", "http://w:1");
    assert_eq!(said.complete(&open).model_names().collect::<Vec<_>>(), ["a", "b", "c"]);
    // A name given by hand is all that is meant.
    let named = WorkerRecord { model_name: "mine".to_owned(), ..open };
    assert_eq!(said.complete(&named).model_names().collect::<Vec<_>>(), ["mine"]);
    let many: Vec<_> = (0..100).map(|number| serde_json::json!({"id": format!("m{number}")})).collect();
    let many = serde_json::json!({ "data": many }).to_string();
    let said = facts(|facts| facts.read_models(many.as_bytes())).unwrap();
    assert_eq!(said.further_model_names.len(), limits::FURTHER_MODEL_NAMES_MAX);
}

#[test]
fn vllm_event_sources() {
    let body =
        br#"{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","topic":"kv-events","buffer_steps":10000},
        "1":{"endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:5658"}}"#;
    let two_ranks = facts(|facts| facts.read_event_sources(body, "10.0.0.5")).unwrap();
    assert_eq!(two_ranks.kv_events_endpoint.as_deref(), Some("tcp://10.0.0.5:5557"));
    assert_eq!(two_ranks.kv_replay_endpoint.as_deref(), Some("tcp://10.0.0.5:5657"));
    assert_eq!((two_ranks.dp_size, two_ranks.engine), (Some(2), Some("vllm")));

    let body = br#"{"0":{"endpoint":"tcp://engine-7:5557","replay_endpoint":null,"block_size":32}}"#;
    let one_rank = facts(|facts| facts.read_event_sources(body, "::1")).unwrap();
    assert_eq!(one_rank.kv_events_endpoint.as_deref(), Some("tcp://engine-7:5557"));
    assert_eq!((one_rank.kv_replay_endpoint, one_rank.dp_size, one_rank.kv_block_size), (None, None, Some(32)));

    for (body, endpoint) in [
        (&br#"{"0":{"endpoint":"tcp://*:5557"}}"#[..], Some("tcp://[fd00::5]:5557")),
        (br#"{"0":{"endpoint":"ipc:///tmp/kv"}}"#, None),
        (br#"{"0":{"endpoint":7}}"#, None),
        (br#"{}"#, None),
        (br#"{"detail":"Not Found"}"#, None),
    ] {
        let facts = facts(|facts| facts.read_event_sources(body, "fd00::5")).unwrap();
        assert_eq!(facts.kv_events_endpoint.as_deref(), endpoint, "{}", String::from_utf8_lossy(body));
    }
    assert!(facts(|facts| facts.read_event_sources(b"[1]", "h")).is_err());
}

#[test]
fn vllm_metrics() {
    for (text, expected) in [
        ("vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"0\"} 1.0\n", Some(16)),
        ("# HELP vllm:cache_config_info x\nvllm:cache_config_info{a=\"b\", block_size=\"64\"} 1\n", Some(64)),
        ("vllm:cache_config_info{block_size=\"None\"} 1\n", None),
        ("vllm:cache_config_info{num_block_size=\"16\"} 1\n", None),
        ("vllm:cache_config_info 1\n", None),
        ("sglang:token_usage 0.5\n", None),
        ("", None),
    ] {
        let mut facts = Facts::default();
        facts.read_metrics(text.as_bytes());
        assert_eq!(facts.kv_block_size, expected, "{text}");
    }
}

#[test]
fn sglang_server_info() {
    // Arguments at the top, events as the argument string of older releases.
    let body = br#"{"model_path":"m","page_size":64,"dp_size":2,"version":"0.5.9",
        "kv_events_config":"{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"topic\":\"kv-events\"}"}"#;
    let old = facts(|facts| facts.read_server_info(body, "h")).unwrap();
    assert_eq!((old.kv_block_size, old.dp_size, old.engine), (Some(64), Some(2), Some("sglang")));
    assert_eq!(old.kv_events_endpoint.as_deref(), Some("tcp://h:5557"));
    // Newer releases say it outright.
    let body =
        br#"{"server_args":{"page_size":1},"kv_events":{"endpoint_port_base":6000,"replay_endpoint_port_base":6100,
        "block_size":16,"dp_size":4}}"#;
    let new = facts(|facts| facts.read_server_info(body, "::1")).unwrap();
    assert_eq!((new.kv_block_size, new.dp_size), (Some(16), Some(4)));
    assert_eq!(new.kv_events_endpoint.as_deref(), Some("tcp://[::1]:6000"));
    assert_eq!(new.kv_replay_endpoint.as_deref(), Some("tcp://[::1]:6100"));
    // No events configured, one rank.
    let facts_of = |body: &[u8]| facts(|facts| facts.read_server_info(body, "h"));
    let plain = facts_of(br#"{"page_size":1,"dp_size":1,"kv_events_config":null}"#).unwrap();
    assert_eq!((plain.kv_block_size, plain.dp_size, plain.kv_events_endpoint), (Some(1), None, None));
    // Template arguments at either place, as text too; said to be none is not the same as not said.
    for (arguments, expected) in [
        (r#","default_chat_template_kwargs":{"enable_thinking":false}"#, Some(r#"{"enable_thinking":false}"#)),
        (r#","server_args":{"page_size":1,"default_chat_template_kwargs":"{\"a\":1}"}"#, Some(r#"{"a":1}"#)),
        (r#","default_chat_template_kwargs":null"#, Some("{}")),
        (r#","default_chat_template_kwargs":[1]"#, None),
        ("", None),
    ] {
        let said = facts_of(format!(r#"{{"page_size":1{arguments}}}"#).as_bytes()).unwrap().template_arguments;
        assert_eq!(said.map(|said| serde_json::Value::Object(said).to_string()).as_deref(), expected);
    }
    // Another server's info, and nonsense.
    assert_eq!(facts_of(br#"{"vllm_config":"x"}"#), Ok(Facts::default()));
    assert_eq!(facts_of(br#"{"page_size":0,"dp_size":-1}"#).unwrap().kv_block_size, None);
    assert!(facts_of(b"no").is_err());
}

#[test]
fn the_record_goes_before_the_answer() {
    let facts = Facts {
        model_name: Some("asked".to_owned()),
        further_model_names: vec!["also asked".to_owned()],
        engine: Some("vllm"),
        kv_block_size: Some(16),
        dp_size: Some(2),
        kv_events_endpoint: Some("tcp://h:1".to_owned()),
        kv_replay_endpoint: Some("tcp://h:2".to_owned()),
        template_arguments: serde_json::json!({"a": 1}).as_object().cloned(),
    };
    let open = facts.complete(&WorkerRecord::new("w", "http://h:1"));
    assert_eq!((open.model_name.as_str(), open.engine.as_str()), ("asked", "vllm"));
    assert_eq!((open.kv_block_size, open.dp_size), (Some(16), Some(2)));
    assert_eq!(open.kv_replay_endpoint.as_deref(), Some("tcp://h:2"));

    let mut stated = WorkerRecord::new("w", "http://h:1");
    stated.model_name = "said".to_owned();
    (stated.kv_block_size, stated.dp_rank) = (Some(64), Some(1));
    let complete = facts.complete(&stated);
    assert_eq!((complete.model_name.as_str(), complete.kv_block_size), ("said", Some(64)));
    // A worker dedicated to one rank does not become a rank-multiplexed one.
    assert_eq!(complete.dp_size, None);

    assert_eq!(open.default_chat_template_kwargs, facts.template_arguments);
    stated.default_chat_template_kwargs = Some(serde_json::Map::new());
    assert_eq!(facts.complete(&stated).default_chat_template_kwargs, Some(serde_json::Map::new()));
}
