//! `runtimes`
fn main() {}
