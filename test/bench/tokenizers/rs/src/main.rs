//! Encodes texts with a Rust tokenizer and says what CPU time each took. The protocol is described in ../compare.py.
//!
//!     tokenizers-rs hf|fastokens|fastokens-segments FOLDER

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

/// CPU time of this process, all threads, in nanoseconds.
fn cpu_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    assert_eq!(failed, 0, "clock_gettime");
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Memory that this process has in RAM, in bytes.
fn resident() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("no VmRSS"))
}

/// Keeps the process busy before the clock starts, as every engine is: see ../README.md.
fn settle() {
    let start = cpu_ns();
    while cpu_ns() - start < 8_000_000 {}
}

enum Engine {
    Hf(Box<tokenizers::Tokenizer>),
    Fastokens(Box<fastokens::Tokenizer>),
}

impl Engine {
    fn load(name: &str, file: &Path) -> Result<Engine, Box<dyn std::error::Error>> {
        match name {
            "hf" => Ok(Engine::Hf(Box::new(tokenizers::Tokenizer::from_file(file).map_err(|e| e.to_string())?))),
            "fastokens" => Ok(Engine::Fastokens(Box::new(fastokens::Tokenizer::from_file(file)?))),
            "fastokens-segments" => {
                let mut t = fastokens::Tokenizer::from_file(file)?;
                t.enable_segment_cache(64 << 20); // as much as kvepp's
                Ok(Engine::Fastokens(Box::new(t)))
            }
            _ => Err(format!("no engine is called {name:?}").into()),
        }
    }

    /// The ids of text with the model's own tokens around it, and the CPU time it took to get them.
    fn encode(&self, text: &str) -> Result<(u64, Vec<u32>), Box<dyn std::error::Error>> {
        match self {
            Engine::Hf(t) => {
                let start = cpu_ns();
                // The crate's fastest way: without offsets.
                let encoding = t.encode_fast(text, true).map_err(|e| e.to_string())?;
                let took = cpu_ns() - start;
                Ok((took, encoding.get_ids().to_vec()))
            }
            Engine::Fastokens(t) => {
                let start = cpu_ns();
                let ids = t.encode_with_special_tokens(text, true)?;
                Ok((cpu_ns() - start, ids))
            }
        }
    }
}

fn read_u32(input: &mut impl Read) -> io::Result<u32> {
    let mut raw = [0; 4];
    input.read_exact(&mut raw)?;
    Ok(u32::from_le_bytes(raw))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, name, folder] = arguments.as_slice() else {
        return Err("usage: tokenizers-rs hf|fastokens|fastokens-segments FOLDER".into());
    };
    let mut input = BufReader::new(io::stdin().lock());
    let mut output = BufWriter::new(io::stdout().lock());
    let (start, before) = (cpu_ns(), resident()?);
    let engine = Engine::load(name, &Path::new(folder).join("tokenizer.json"))?;
    writeln!(output, "{{\"load_ns\": {}, \"resident\": {}}}", cpu_ns() - start, resident()?.saturating_sub(before))?;
    output.flush()?;

    let mut op = [0];
    loop {
        match input.read_exact(&mut op) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        if op[0] != b'e' {
            return Err(format!("unknown operation {:?}", op[0] as char).into());
        }
        let mut texts = Vec::new();
        for _ in 0..read_u32(&mut input)? {
            let mut text = vec![0; read_u32(&mut input)? as usize];
            input.read_exact(&mut text)?;
            texts.push(String::from_utf8(text)?);
        }
        let mut answers = Vec::new();
        settle();
        for text in &texts {
            answers.push(engine.encode(text)?);
        }
        for (took, ids) in answers {
            output.write_all(&took.to_le_bytes())?;
            output.write_all(&(ids.len() as u32).to_le_bytes())?;
            for id in ids {
                output.write_all(&id.to_le_bytes())?;
            }
        }
        output.flush()?;
    }
}
