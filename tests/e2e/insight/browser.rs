//! A headless Chromium that a test drives: one page, by the DevTools protocol over two pipes. Ends with the value that it is.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use serde_json::{Value, json};

use crate::support::PATIENCE;

/// The browser's program; nothing, said loudly, where there is none.
pub fn program() -> Option<PathBuf> {
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    let search = std::env::var_os("PATH").unwrap_or_default();
    let found = names
        .iter()
        .flat_map(|name| std::env::split_paths(&search).map(move |directory| directory.join(name)))
        .find(|path| path.is_file());
    if found.is_none() {
        let message = "NOT RUN: no Chromium (Debian: chromium-headless-shell)";
        assert!(std::env::var_os("INFERA_REQUIRE_BROWSER").is_none_or(|value| value != "1"), "{message}");
        eprintln!("{message}");
    }
    found
}

/// Containers have no user namespaces for its sandbox, and little shared memory.
const OPTIONS: [&str; 5] =
    ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"];

pub struct Page {
    browser: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    session: String,
    last_id: u64,
    _profile: tempfile::TempDir,
}

impl Page {
    /// Opens `url` on a screen of this size, CSS pixels; narrow ones are phones.
    pub fn open(url: &str, width: u32, height: u32) -> Option<Page> {
        let program = program()?;
        let profile = tempfile::tempdir().unwrap();
        // The protocol's descriptors are 3 and 4; what the browser prints must not come between.
        let mut browser = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null"#])
            .arg(program)
            .args(OPTIONS)
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let (commands, answers) = (browser.stdin.take().unwrap(), browser.stdout.take().unwrap());
        let (sender, messages) = channel();
        // Ends with the pipe.
        std::thread::spawn(move || {
            let messages = BufReader::new(answers).split(0).map_while(Result::ok);
            let parsed = messages.map(|message| serde_json::from_slice(&message).expect("messages are JSON"));
            parsed.take_while(|message: &Value| sender.send(message.clone()).is_ok()).for_each(drop);
        });
        let mut page = Page { browser, commands, messages, session: String::new(), last_id: 0, _profile: profile };
        let target = page.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = page.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        page.session = attached["sessionId"].as_str().expect("a session").to_owned();
        let screen = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        page.call("Emulation.setDeviceMetricsOverride", screen);
        page.call("Page.navigate", json!({"url": url}));
        Some(page)
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let answer = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Everything that can be read on the page.
    pub fn text(&mut self) -> String {
        self.value("document.body ? document.body.innerText : ''").as_str().unwrap_or_default().to_owned()
    }

    /// Clicks into an element, types, and presses Enter.
    pub fn enter(&mut self, id: &str, text: &str) {
        self.value(&format!("document.getElementById({id:?}).focus()"));
        self.call("Input.insertText", json!({"text": text}));
        for kind in ["keyDown", "keyUp"] {
            let key = json!({"type": kind, "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"});
            self.call("Input.dispatchKeyEvent", key);
        }
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut command = json!({"id": self.last_id, "method": method, "params": params});
        if !self.session.is_empty() {
            command["sessionId"] = json!(self.session);
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).expect("the browser reads");
        loop {
            let message = self.messages.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{method}: no answer"));
            if message["id"] == self.last_id {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.browser.kill();
        let _ = self.browser.wait();
    }
}
