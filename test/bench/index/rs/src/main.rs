//! Runs workloads on Dynamo's indexes, and times Dynamo's block hashing and worker selection. It says what CPU time things
//! took; it judges nothing itself.
//!
//!     index-rs crtc|radix       an engine for ../index.py, which describes the commands
//!     index-rs scheduling       the same for ../events.py

mod crtc;
mod replay;
mod scheduling;
mod workload;

use std::io::{self, BufRead, Write};

/// CPU time of the calling thread, in nanoseconds.
pub fn cpu_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    assert_eq!(failed, 0, "clock_gettime");
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = std::env::args().nth(1).unwrap_or_default();
    let mut open: Option<crtc::Readers> = None;
    let mut out = io::stdout();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match (engine.as_str(), command) {
            ("crtc", "run") => replay::run(argument, crtc::Crtc::new())?,
            ("radix", "run") => replay::run(argument, dynamo_kv_router::RadixTree::new())?,
            ("crtc", "memory") => replay::memory(argument, crtc::Crtc::new())?,
            ("crtc", "open") => {
                open = Some(crtc::Readers::open(argument)?);
                "null".to_string()
            }
            ("crtc", "readers") => open.as_ref().ok_or("nothing is open")?.read(argument.parse()?),
            ("crtc", "beside") => open.as_mut().ok_or("nothing is open")?.beside_writer(argument.parse()?),
            ("crtc", "write") => open.as_mut().ok_or("nothing is open")?.write(argument.parse()?),
            ("scheduling", "hash") => scheduling::hash(argument.parse()?),
            ("scheduling", "select") => scheduling::select(argument.parse()?)?,
            _ => return Err(format!("{engine}: command {line:?}").into()),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}
