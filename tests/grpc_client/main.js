// Takes part in a group over gRPC, with a client made from the .proto when it starts.
//
//   node main.js PROTO ADDRESS TOPIC OUTPUT COUNT
//
// Copies COUNT records to OUTPUT, one transaction each, up to four at a time. On the way it rolls the first one
// back once, sends what makes no sense, and leaves when all is committed. The packages are found by NODE_PATH.
'use strict'

const assert = require('node:assert/strict')
const grpc = require('@grpc/grpc-js')
const loader = require('@grpc/proto-loader')

const PATIENCE_MS = 30_000
const CREDITS = 4

const [proto, address, topic, output, count] = process.argv.slice(2)
const { semel } = grpc.loadPackageDefinition(
  loader.loadSync(proto, { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true })
)
const client = new semel.subscriptions.v1.Subscriptions(address, grpc.credentials.createInsecure())
const stream = client.Subscribe({ deadline: Date.now() + PATIENCE_MS })

const seen = { attempts: [], placed: [], warnings: [], refused: [], committed: 0, rolledBack: 0 }
const records = new Map()
let isNacked = false

const handlers = {
  ready({ settings, max_credits }) {
    assert.equal(settings.max_attempts, 4)
    assert.ok(max_credits >= CREDITS)
    stream.write({ ack: { delivery_id: 12345 } })
  },
  warning({ problem }) {
    seen.warnings.push(problem)
  },
  delivery({ delivery_id, attempt, partition, records: [record] }) {
    assert.equal(partition, 0)
    seen.attempts.push(attempt)
    records.set(delivery_id, record)
    stream.write({ begin: { delivery_id } })
    stream.write({
      statement: {
        delivery_id,
        statement_id: 1,
        topic: output,
        key: record.key,
        value: record.value,
        headers: [{ key: 'by', value: Buffer.from('node') }],
      },
    })
  },
  applied({ delivery_id, partition, offset }) {
    seen.placed.push([partition, offset])
    if (isNacked) {
      stream.write({ ack: { delivery_id } })
      stream.write({ statement: { delivery_id, statement_id: 2, topic: output, value: Buffer.from('late') } })
    } else {
      isNacked = true
      stream.write({ nack: { delivery_id, reason: 'once more', delay_ms: 10 } })
    }
  },
  refused({ problem, rejects_transaction }) {
    assert.equal(rejects_transaction, false)
    seen.refused.push(problem)
  },
  rolled_back({ cause, reason }) {
    assert.deepEqual([cause, reason], ['CAUSE_NACKED', 'once more'])
    seen.rolledBack += 1
  },
  committed({ delivery_id }) {
    assert.ok(records.has(delivery_id))
    seen.committed += 1
    if (seen.committed === Number(count)) stream.end()
  },
}

function finish() {
  assert.equal(seen.rolledBack, 1)
  assert.deepEqual(seen.warnings, ['PROBLEM_UNKNOWN_DELIVERY'])
  assert.deepEqual(new Set(seen.refused), new Set(['PROBLEM_TOO_LATE']))
  assert.equal(seen.refused.length, Number(count))
  assert.deepEqual([...seen.attempts].sort(), [...Array(Number(count)).fill(1), 2])
  assert.equal(new Set(seen.placed.map(String)).size, Number(count) + 1)
  console.log('ok')
}

stream.on('data', response => handlers[response.message](response[response.message]))
stream.on('error', error => {
  console.error(error)
  process.exit(1)
})
stream.on('end', () => {
  finish()
  client.close()
})
stream.write({ setup: { group: topic, topics: [topic], credits: CREDITS, settings: { max_attempts: 4 } } })
