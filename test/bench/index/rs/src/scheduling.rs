//! Dynamo's block hashing and its default worker selection.

use crate::cpu_ns;
use dynamo_kv_router::protocols::*;
use dynamo_kv_router::scheduling::{OverlapSignals, ScheduleMode};
use dynamo_kv_router::{DefaultWorkerSelector, KvRouterConfig, SchedulingRequest, WorkerLoadProjection, WorkerSelectionInput, WorkerSelector};
use std::collections::{HashMap, HashSet};
use std::hint::black_box;

const TOKENS: u32 = 8192;

/// The same prompt as ../events-go's.
fn prompt() -> Vec<u32> {
    (0..TOKENS).map(|i| i.wrapping_mul(2654435761) % 151936).collect()
}

/// CPU time of hashing a prompt of 8,192 tokens: its blocks, and the chain over them, in ns a block, and a digest.
pub fn hash(block_size: u32) -> String {
    const TIMES: usize = 4000;
    let tokens = prompt();
    let local = compute_block_hash_for_seq(&tokens, block_size, BlockHashOptions::default());
    let start = cpu_ns();
    for _ in 0..TIMES {
        black_box(compute_block_hash_for_seq(black_box(&tokens), block_size, BlockHashOptions::default()));
    }
    let hashed = cpu_ns();
    for _ in 0..TIMES {
        black_box(compute_seq_hash_for_block(black_box(&local)));
    }
    let chained = cpu_ns();
    let blocks = (TIMES * local.len()) as f64;
    let sum = compute_seq_hash_for_block(&local).iter().zip(&local).fold(0u64, |sum, (s, l)| sum.wrapping_add(*s ^ l.0));
    format!(
        r#"{{"local_ns": {}, "sequence_ns": {}, "digest": "{sum:016x}"}}"#,
        (hashed - start) as f64 / blocks,
        (chained - hashed) as f64 / blocks
    )
}

#[derive(Default)]
struct Worker {
    taints: HashSet<String>,
}

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }
    fn data_parallel_size(&self) -> u32 {
        1
    }
    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }
    fn total_kv_blocks(&self) -> Option<u64> {
        None
    }
    fn taints(&self) -> &HashSet<String> {
        &self.taints
    }
}

/// CPU time of choosing among n workers whose loads and overlaps are known, in ns a worker.
pub fn select(n: u64) -> Result<String, Box<dyn std::error::Error>> {
    let (mut workers, mut overlap) = (HashMap::new(), OverlapSignals::default());
    let mut loads = rustc_hash::FxHashMap::default();
    for id in 0..n {
        let worker = WorkerWithDpRank::from_worker_id(id);
        let cached_blocks = id as usize % 32;
        workers.insert(id, Worker::default());
        overlap.effective_overlap_blocks.insert(worker, cached_blocks as f64);
        overlap.effective_cached_tokens.insert(worker, cached_blocks * 64);
        let load = WorkerLoadProjection {
            active_prefill_tokens: id as usize * 16,
            active_decode_blocks: id as usize % 127,
            active_requests: id as usize % 17,
            ..Default::default()
        };
        loads.insert(worker, load);
    }
    let request = SchedulingRequest {
        mode: ScheduleMode::QueryOnly { request_id: None },
        token_seq: None,
        isl_tokens: TOKENS as usize,
        lora_name: None,
        expected_output_tokens: None,
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints::default(),
        router_config_override: None,
        track_prefill_tokens: true,
        priority_jump: 0.0,
        strict_priority: 0,
        policy_class: None,
        session_context: None,
        overlap,
        kv_transfer_candidates: None,
        retain_kv_transfer_chain: false,
        shared_cache_hits: None,
        worker_loads: loads,
        resp_tx: None,
    };
    let selector = DefaultWorkerSelector::new(Some(KvRouterConfig::default()), "prefill");
    let times = (4_000_000 / n).max(20);
    let mut took = 0;
    for round in 0..=times {
        let start = cpu_ns();
        let input = WorkerSelectionInput::configured(black_box(&workers), black_box(&request), request.eligibility(), 64);
        black_box(selector.select_worker(input)?);
        if round > 0 {
            took += cpu_ns() - start;
        }
    }
    Ok(format!(r#"{{"select_ns": {}}}"#, took as f64 / (times * n) as f64))
}
