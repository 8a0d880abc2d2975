//! Thread-per-core HTTP/1.1 engine of the router. It owns listeners, the HTTP/1.1 codec on both sides,
//! the upstream connection pool, the relay, timers, pinning and cross-thread wake-up. It never parses
//! JSON and never knows what a worker, a model or a prompt is.
